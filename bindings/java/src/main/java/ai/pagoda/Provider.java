package ai.pagoda;

/** Where a model runs. */
public enum Provider {
    /** On a GPU where there is one, else on the CPU; {@link Model#provider} says which it became. */
    AUTO(0),
    /** On the CPU. */
    CPU(1),
    /** On an NVIDIA GPU, or not at all. */
    CUDA(2),
    /** Somewhere that this version does not know; not to be asked for. */
    UNKNOWN(-1);

    final int number;

    Provider(int number) {
        this.number = number;
    }

    static Provider of(int number) {
        return number >= 0 && number < UNKNOWN.ordinal() ? values()[number] : UNKNOWN;
    }
}
