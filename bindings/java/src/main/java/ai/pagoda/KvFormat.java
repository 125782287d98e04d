package ai.pagoda;

/** How pages hold keys and values. */
public enum KvFormat {
    /** As the model was exported. */
    DEFAULT(0),
    /** Numbers of the type that the model computes in. */
    NATIVE(1),
    /** 8 bits, with a scale and a low end for each head of each token. */
    INT8(2),
    /** 4 bits, with a scale and a low end for each head of each token. */
    INT4(3),
    /** Floating-point numbers of 8 bits (e4m3fn), with a scale for each head of each token. */
    FP8(4);

    final int number;

    KvFormat(int number) {
        this.number = number;
    }
}
