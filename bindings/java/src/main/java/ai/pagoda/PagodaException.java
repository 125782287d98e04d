package ai.pagoda;

import java.nio.charset.StandardCharsets;

/** What went wrong, in words: what was wrong with which value, and what to do about it. */
public final class PagodaException extends RuntimeException {
    private static final long serialVersionUID = 1;

    /** The status of pagoda.h. */
    private final int code;
    /** The argument at fault. */
    private final String argument;

    PagodaException(Status status, String message, String argument) {
        super(message);
        this.code = status.number();
        this.argument = argument;
    }

    /** Called by the native part. */
    PagodaException(int code, byte[] message, byte[] argument) {
        super(new String(message, StandardCharsets.UTF_8));
        this.code = code;
        this.argument = new String(argument, StandardCharsets.UTF_8);
    }

    /**
     * The status.
     *
     * @return the status, {@link Status#UNKNOWN} for a number that this version does not know
     */
    public Status status() {
        return Status.of(code);
    }

    /**
     * The number of the status in {@code pagoda.h}.
     *
     * @return the number
     */
    public int code() {
        return code;
    }

    /**
     * Which argument of the C function was at fault.
     *
     * @return its name, e.g. {@code inputs[1]} or {@code options.provider}; empty if none was
     */
    public String argument() {
        return argument;
    }
}
