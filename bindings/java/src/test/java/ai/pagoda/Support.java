package ai.pagoda;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;

import java.nio.file.Path;
import java.util.function.BooleanSupplier;
import java.util.function.Supplier;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.function.Executable;

/** What the tests share: where things are, and that nothing is left after each. */
abstract class Support {
    static final Path ROOT = Path.of(System.getProperty("pagoda.root")).normalize();
    static final Path HELLO = ROOT.resolve("target/demo/hello.onnx");
    static final Path MODEL = ROOT.resolve("target/demo/model.onnx");
    static final Path LLAMA = ROOT.resolve("tests/data/generate/llama");
    static final Path FOLDERS = ROOT.resolve("tests/data/engine");

    private long before;

    @BeforeEach
    void count() {
        before = Pagoda.liveObjects();
    }

    /** What a callback had is freed just after it returns, so this waits; but not for the garbage collector. */
    @AfterEach
    void nothingIsLeft() {
        eventually(() -> Pagoda.liveObjects() == before,
                () -> Pagoda.liveObjects() + " objects are left, and there were " + before);
    }

    /** The tests run on the CPU with one thread, wherever they run. */
    static ModelOptions cpu() {
        return new ModelOptions().provider(Provider.CPU).intraOpThreads(1).sleepWhenIdle(true);
    }

    static void fails(Status status, String argument, Executable action) {
        PagodaException error = assertThrows(PagodaException.class, action);
        assertEquals(status, error.status(), error.getMessage());
        assertEquals(status.number(), error.code());
        assertEquals(argument, error.argument(), error.getMessage());
        assertFalse(error.getMessage().isEmpty());
    }

    static void eventually(BooleanSupplier holds, Supplier<String> what) {
        long end = System.nanoTime() + 10_000_000_000L;
        while (!holds.getAsBoolean()) {
            if (System.nanoTime() > end) {
                throw new AssertionError("not after 10 seconds: " + what.get());
            }
            try {
                Thread.sleep(2);
            } catch (InterruptedException error) {
                throw new AssertionError(error);
            }
        }
    }
}
