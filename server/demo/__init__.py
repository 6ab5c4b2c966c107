"""The demo: a real server, real requests, some held up on purpose, and the verdict on each.

`scenario` says what is sent, `drive` sends it, `report` reads the recording and compares, `run`
puts them in order.
"""
