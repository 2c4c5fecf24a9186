"""dflash-train: from a target model to a drafter checkpoint."""
