"""What `tools/headline.sh` does: cold prompts in every lazy mode, step by step, kept from one sitting to the next."""
