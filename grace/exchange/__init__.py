"""One round trip of one bucket: what is sent, what comes back, and what becomes of it."""
