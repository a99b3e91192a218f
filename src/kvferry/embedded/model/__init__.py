"""Small models that need no Hub: with random weights, trained on this machine, or out of a package of weights.

Enters: a seed, a text, a file. Leaves: a model's folder with weights and tokenizer, made once. It knows no engine.
"""
