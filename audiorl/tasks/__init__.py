"""What only simultaneous interpretation (`simul`) and speech output (`tts`) need."""
