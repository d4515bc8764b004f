"""Where tpfuse meets other libraries: Hugging Face files and names, PEFT adapters, models of transformers.

``names`` and ``huggingface`` stand below ``models``, which reads files with them; ``adapter`` and ``parallelize``
stand above.

accelerator   accelerate's Accelerator on a split model
adapter       adapters in PEFT's format
parallelize   one line for a model of transformers
parallelized  what the module becomes: its forward, generate, files
peft          what a LoraConfig of PEFT asks for
trainer       transformers' Trainer on a split model
vocabulary    its embedding and head to callers of transformers, and another number of rows
"""
