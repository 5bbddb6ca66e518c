"""The round trip of a bucket: codecs, wires, headers, and the collectives of its route."""
