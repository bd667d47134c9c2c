"""The engine as a network service: HTTP in, HTTP out; needs the extra `serve`."""
