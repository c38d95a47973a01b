"""By what rule does an attention head pick its key, how exactly, and up to what length?"""
