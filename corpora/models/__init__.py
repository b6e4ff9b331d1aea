"""Make small models without a hub: grafted speech models, CTC alignment, a recogniser and a speaker encoder."""
