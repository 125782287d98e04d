package ai.pagoda;

/** Gets the lines of the log. */
@FunctionalInterface
public interface LogHandler {
    /**
     * Called with each line, from any thread. It must not call {@link Pagoda#setLog} or open models or engines; lines that
     * arise while it runs are dropped. What it throws goes to the system logger {@code ai.pagoda} and no further.
     *
     * @param level the level of the line
     * @param source who speaks, e.g. {@code onnxruntime}
     * @param message what is said
     */
    void line(LogLevel level, String source, String message);
}
