"""Interfaces to other libraries: PEFT adapters, models of transformers, accelerate.

accelerator        accelerate's Accelerator on a split model
adaptable          what may have adapters
adapter            adapters in PEFT's format
arguments          the arguments of a call by their names
body               the model below the head
changed            parts of a module that are not those of its config
documents          position_ids that begin again: packed documents
expert_adapter     adapters of experts in PEFT's format
lora_config        a LoraConfig of PEFT as the arguments of add_lora
lora_options       the options of a LoraConfig: which are read, which are refused
lora_options.json  their defaults in PEFT, as python -m bench.defaults writes them
parallelize        one line for a model of transformers
parallelized       the class of the parallelized module: its forward, generate, files
peft_model         a PeftModel in the place of the module that it wraps
peft_targets       the modules that a LoraConfig adapts
trainer            transformers' Trainer on a split model
vocabulary         the embedding and head with transformers' interface, and their resizing
"""
