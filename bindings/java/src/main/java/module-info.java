/** Pagoda: inference for models that remember. */
module ai.pagoda {
    exports ai.pagoda;
}
