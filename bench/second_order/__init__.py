"""Second-order optimizers in the bubbles of a pipeline that trains the demo's model.

    pip install pytorch_optimizer
    python -m bench.second_order.curves --json bench/results/second_order.json
    python -m bench.second_order.page        the table and the picture of docs/pipeline.md, from that file

curves  trains, and plans
page    the table and the picture
"""
