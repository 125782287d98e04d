package ai.pagoda;

import java.util.Objects;

/** What concerns the whole process: the library's version, its log and its metrics. */
public final class Pagoda {
    static {
        Native.load();
    }

    private Pagoda() {}

    /**
     * The version of the library.
     *
     * @return the version, e.g. {@code 0.1.0}
     */
    public static String version() {
        return Native.string(versionText());
    }

    /**
     * The version of the library as a number.
     *
     * @return major * 1,000,000 + minor * 1,000 + patch
     */
    public static native int versionNumber();

    /**
     * The version of the library's binary interface. Whether it is that of this jar was checked when it was loaded.
     *
     * @return the version
     */
    public static native int abiVersion();

    /**
     * How many objects the process holds: 0 if everything was closed.
     *
     * @return the number
     */
    public static native long liveObjects();

    /**
     * The metrics of the process as Prometheus text.
     *
     * @return the text
     */
    public static String metrics() {
        return Native.string(metricsText());
    }

    /**
     * Has the log of Pagoda and of ONNX Runtime sent to a handler, from any thread. When this returns, the handler of
     * before is not running and will not be called again. Without a handler nothing is logged.
     *
     * @param level up to which level
     * @param handler gets the lines; {@code null} stops the log
     * @throws IllegalStateException within a handler
     */
    public static void setLog(LogLevel level, LogHandler handler) {
        Objects.requireNonNull(level, "level");
        outsideHandler();
        setLog(level.number, handler);
    }

    /** pagoda.h would wait for itself. */
    static void outsideHandler() {
        if (Logging.HERE.get() != null) {
            throw new IllegalStateException("a log handler must neither set the log nor open models: do it elsewhere");
        }
    }

    /**
     * What the native part calls. It looks for this class while it is being loaded, which Pagoda itself waits for: a
     * thread that loads it and another one that begins with Pagoda would wait for each other.
     */
    private static final class Logging {
        /** Whether this thread is in a log handler. */
        static final ThreadLocal<Boolean> HERE = new ThreadLocal<>();

        /** What a handler throws goes no further. */
        static void logged(LogHandler handler, int level, byte[] source, byte[] message) {
            HERE.set(true);
            try {
                handler.line(LogLevel.values()[level], Native.string(source), Native.string(message));
            } catch (Throwable error) {
                System.getLogger("ai.pagoda").log(System.Logger.Level.WARNING, "a log handler failed", error);
            } finally {
                HERE.remove();
            }
        }
    }

    static native byte[] statusName(int status);

    static native byte[] typeName(int type);

    private static native byte[] versionText();

    private static native byte[] metricsText();

    private static synchronized native void setLog(int level, LogHandler handler);
}
