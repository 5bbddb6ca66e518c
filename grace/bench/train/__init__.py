"""Does a model still learn, and how soon?"""
