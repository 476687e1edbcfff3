"""How far two aligned recordings are apart, where that is more than noise, and which op or module made it."""
