"""How weights lie in bytes, below the engines and everybody who sends or takes them.

bucket.py              `WeightBucket`: named tensors in one buffer, and packing a model into several
packed.py              SGLang's flattened bucket, without padding
wire.py                a bucket as the binary body of our server
checkpoint_names.py    a model's tensors as its checkpoint calls them
checkpoint_folder.py   what is wrong with a folder of weights
finite.py              whether weights are all finite
safetensors.py         SGLang's JSON body with safetensors in place of pickles
"""
