"""What runs in the processes of peers, each under the peer's own interpreter."""
