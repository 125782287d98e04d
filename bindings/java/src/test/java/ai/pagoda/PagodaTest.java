package ai.pagoda;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.file.Files;
import java.nio.file.Path;
import java.text.MessageFormat;
import java.util.List;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicReference;
import java.util.logging.Handler;
import java.util.logging.LogRecord;
import java.util.logging.Logger;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.Test;

class PagodaTest extends Support {
    @AfterEach
    void noLog() {
        Pagoda.setLog(LogLevel.OFF, null);
    }

    @Test
    void version() throws Exception {
        String cargo = Files.readString(ROOT.resolve("Cargo.toml"));
        assertTrue(cargo.contains("version = \"" + Pagoda.version() + "\""), Pagoda.version());
        assertTrue(Files.readString(ROOT.resolve("bindings/java/pom.xml"))
                .contains("<version>" + Pagoda.version() + "</version>"), "pom.xml has another version");
        assertEquals(1, Pagoda.abiVersion());
    }

    @Test
    void namesAreThoseOfTheLibrary() {
        for (Status status : Status.values()) {
            assertEquals(status.name(), Native.string(Pagoda.statusName(status.number())));
            assertEquals(status, Status.of(status.number()));
        }
        assertEquals(Status.UNKNOWN, Status.of(4711));
        for (ElementType type : ElementType.values()) {
            assertEquals(type.toString(), Native.string(Pagoda.typeName(type.number())));
        }
        // One more than there are here would be one that this binding does not know.
        assertEquals("undefined", Native.string(Pagoda.typeName(ElementType.values().length)));
        assertEquals(ElementType.UNDEFINED, ElementType.of(4711));
    }

    @Test
    void metrics() throws Exception {
        try (Model model = Model.open(HELLO, cpu())) {
            assertTrue(Pagoda.metrics().contains("pagoda_"), Pagoda.metrics());
            assertTrue(Pagoda.metrics().endsWith("# EOF\n"), Pagoda.metrics());
        }
    }

    @Test
    void logs() throws Exception {
        List<String> lines = new CopyOnWriteArrayList<>();
        Pagoda.setLog(LogLevel.DEBUG, (level, source, message) -> lines.add(level + " " + source + " " + message));
        assertThrows(PagodaException.class, () -> Model.open(Path.of("no such \u5854.onnx")));
        assertTrue(lines.stream().anyMatch(line -> line.startsWith("DEBUG") && line.contains("no such \u5854.onnx")),
                lines.toString());
        Pagoda.setLog(LogLevel.OFF, null);
        int before = lines.size();
        assertThrows(PagodaException.class, () -> Model.open(Path.of("no such file.onnx")));
        assertEquals(before, lines.size());
        assertThrows(NullPointerException.class, () -> Pagoda.setLog(null, null));
    }

    @Test
    void aLogHandlerMayFailAndMayNotOpenModels() throws Exception {
        AtomicReference<Throwable> thrown = new AtomicReference<>();
        Logger logger = Logger.getLogger("ai.pagoda");
        logger.setUseParentHandlers(false);
        try {
            for (Runnable action : List.<Runnable>of(() -> Pagoda.setLog(LogLevel.OFF, null), () -> Model.open(HELLO),
                    () -> Engine.open(FOLDERS.resolve("gather")))) {
                thrown.set(null);
                Pagoda.setLog(LogLevel.DEBUG, (level, source, message) -> {
                    try {
                        action.run();
                    } catch (Throwable error) {
                        thrown.compareAndSet(null, error);
                        throw error;
                    }
                });
                assertThrows(PagodaException.class, () -> Model.open(Path.of("no such file.onnx")));
                assertEquals(IllegalStateException.class, thrown.get().getClass());
            }
        } finally {
            logger.setUseParentHandlers(true);
        }
    }

    /** What is not closed is cleaned up, and told. */
    @Test
    void aForgottenCloseIsToldAndMadeUpFor() {
        List<String> told = new CopyOnWriteArrayList<>();
        Logger logger = Logger.getLogger("ai.pagoda");
        Handler handler = new Handler() {
            @Override
            public void publish(LogRecord record) {
                told.add(MessageFormat.format(record.getMessage(), record.getParameters()));
            }

            @Override
            public void flush() {}

            @Override
            public void close() {}
        };
        logger.addHandler(handler);
        logger.setUseParentHandlers(false);
        try {
            forget();
            eventually(() -> {
                System.gc();
                return Pagoda.liveObjects() == 0 && told.size() == 2;
            }, told::toString);
            assertTrue(told.stream().anyMatch(line -> line.startsWith("Cancel was not closed")), told.toString());
            assertTrue(told.stream().anyMatch(line -> line.startsWith("Tensor was not closed")), told.toString());
        } finally {
            logger.removeHandler(handler);
            logger.setUseParentHandlers(true);
        }
    }

    /** As an engine does whose store is slow. */
    @Test
    void aForgottenOneThatIsSlowHoldsUpNoTensor() throws Exception {
        Logger logger = Logger.getLogger("ai.pagoda");
        logger.setUseParentHandlers(false);
        CountDownLatch begun = new CountDownLatch(1);
        CountDownLatch end = new CountDownLatch(1);
        try {
            forgetSlow(begun, end);
            eventually(() -> {
                System.gc();
                return begun.getCount() == 0;
            }, () -> "it is not freed");
            forget();
            eventually(() -> {
                System.gc();
                return Pagoda.liveObjects() == 0;
            }, () -> Pagoda.liveObjects() + " objects are left");
        } finally {
            end.countDown();
            logger.setUseParentHandlers(true);
        }
    }

    private static void forgetSlow(CountDownLatch begun, CountDownLatch end) {
        new NativeObject(1, handle -> {
            begun.countDown();
            try {
                end.await();
            } catch (InterruptedException error) {
                Thread.currentThread().interrupt();
            }
        }) {};
    }

    private static void forget() {
        new Cancel();
        Tensor.of(1f).floatBuffer();
    }
}
