"""The gateway: the server's one public endpoint.

Parses and tokenizes once, admits, picks a pair of workers, sends both legs, relays the tokens. Each
module is one step or one concept of that; `pipeline` puts them in order, `http` faces the client.
"""
