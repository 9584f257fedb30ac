"""Drawing tokens in one launch, where plain operations take thirty."""
