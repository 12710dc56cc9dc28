"""Text types of transformers 5.23 that serve, hybrids apart: tests/e2e builds, serves and compares each of them."""

_NAMES = """
afmoe apertus arcee aria_text axk1 axk2 beam bert bert-generation biogpt bitnet camembert cohere cohere2 cohere2_moe
cohere_compass_text ctrl cwm data2vec-text dbrx deepseek_v2 deepseek_v3 deepseek_v32 dots1 electra ernie ernie4_5
ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text gemma3n_text gemma4_text
gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss granite
granite_swa granitemoe granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax
internlm3 iquestcoder jais2 jetmoe kolibri1 laguna lfm2 llama longcat_flash mellum mimo_v2_flash minicpm3
minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral modernbert-decoder nanochat nemotron olmo
olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe roberta roberta-prelayernorm
roc_bert seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma xlm-roberta xlm-roberta-xl xmod youtu
"""
SERVED_TYPES = tuple(_NAMES.split())
