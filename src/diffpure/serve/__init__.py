"""The defence as a service: images over HTTP to purified images or to the answers of a defended classifier.

    limits     what a request may cost, and the one sentence of a refusal
    decoding   image files are read and written in worker processes with little memory, which may die
    batching   requests of equal shape are computed together, on one thread, until nobody waits for them any more
    metrics    what Prometheus reads
    service    the handler: bytes in, bytes or numbers out; it knows nothing of HTTP
    app        the same as a FastAPI application;  server: the process that listens
    ray        the same on replicas of a Ray cluster

Noise is always drawn from the operating system's entropy, and neither seeds nor paths are in an answer or a log.
"""
