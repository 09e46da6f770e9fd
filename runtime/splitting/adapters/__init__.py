"""What is known of other libraries' models: which inputs they take, what they return, and the loss that goes with it.

Imports nothing of a library before one of its models is there; may import `weightless_model` and what is below it.
"""
