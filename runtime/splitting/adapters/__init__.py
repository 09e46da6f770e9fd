"""Knowledge of other libraries' models: the inputs they take, their outputs, and the loss of each head.

Imports nothing of a library before one of its models is passed; may import `weightless_model` and what is below it.
"""
