"""What compressing costs and loses, on one rank."""
