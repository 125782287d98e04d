package ai.pagoda;

/** Stops runs. One may be handed to any number of runs and requests; once triggered it stays so. */
public final class Cancel extends NativeObject {
    static {
        Native.load();
    }

    /** Makes one that is not triggered. */
    public Cancel() {
        super(make(), Cancel::free);
    }

    /**
     * Stops what was handed this, now and later: it fails with {@link Status#CANCELLED}. The answers of a generator end with
     * what they have.
     */
    public void trigger() {
        trigger(handle());
    }

    private static native long make();

    private native void trigger(long handle);

    private static native void free(long handle);
}
