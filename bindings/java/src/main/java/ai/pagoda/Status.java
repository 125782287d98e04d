package ai.pagoda;

/** How a call ended: the statuses of {@code pagoda.h}. */
public enum Status {
    /** Success. */
    OK(0),
    /** An argument has a value that can not be used; {@link PagodaException#argument} names it. */
    INVALID_ARGUMENT(1),
    /** An object was closed. */
    INVALID_HANDLE(2),
    /** A file, a library or a name does not exist. */
    NOT_FOUND(3),
    /** What was asked for is not possible with this build, this model or this machine. */
    UNSUPPORTED(4),
    /** A limit is reached: a queue is full, a buffer too small, memory exhausted. */
    CAPACITY(5),
    /** The run was cancelled, or its time was over. */
    CANCELLED(6),
    /** The model can not be loaded. */
    MODEL(7),
    /** ONNX Runtime failed while running the model. */
    RUNTIME(8),
    /** Reading or writing a file failed. */
    IO(9),
    /** A bug in Pagoda. Please report it. */
    INTERNAL(10),
    /** The object is in use; try again later. */
    BUSY(11),
    /** A number that this version does not know; {@link PagodaException#code} has it. */
    UNKNOWN(-1);

    private final int number;

    Status(int number) {
        this.number = number;
    }

    /**
     * The number of this status in {@code pagoda.h}.
     *
     * @return the number, -1 for {@link #UNKNOWN}
     */
    public int number() {
        return number;
    }

    static Status of(int number) {
        return number >= 0 && number < UNKNOWN.ordinal() ? values()[number] : UNKNOWN;
    }
}
