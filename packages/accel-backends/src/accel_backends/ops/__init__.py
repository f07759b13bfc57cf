"""Operations that several backends share."""
