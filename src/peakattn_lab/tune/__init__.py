"""peakattn tune: configs raced until one is separated or they are tied.

``tuner`` has them raced by a ``racer`` in a worker process and fills the user's store; ``stored`` shows, merges, exports and
forgets what is in the store; ``cost`` measures what tuning costs a program.
"""
