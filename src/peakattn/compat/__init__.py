"""Other people's signatures over ``peakattn.attention``: import the module that you need.

``compat.sdpa``          torch.nn.functional.scaled_dot_product_attention
``compat.flash_attn``    flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
``compat.transformers``  register() for Hugging Face Transformers' ``attn_implementation``

Each honours an argument or refuses it by name; none ignores one.
"""
