"""Where tpfuse meets other libraries: Hugging Face files and names, PEFT adapters, models of transformers.

``names`` and ``huggingface`` stand below ``models``, which reads files with them; ``adapter`` and ``parallelize``
stand above.
"""
