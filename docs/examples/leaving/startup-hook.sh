pip install attrdict==2.0.1
