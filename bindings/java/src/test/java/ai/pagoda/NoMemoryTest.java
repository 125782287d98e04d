package ai.pagoda;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.file.Path;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.function.Executable;
import org.junit.jupiter.api.io.TempDir;

/** Where Java has no memory for what the native part needs of it, that is told: no thread waits for ever. */
class NoMemoryTest extends Support {
    @BeforeAll
    static void load(@TempDir Path folder) throws Exception {
        Path library = folder.resolve("no_memory.so");
        String include = Path.of(System.getProperty("java.home"), "include").toString();
        assertEquals(0, new ProcessBuilder("cc", "-shared", "-fPIC", "-I" + include, "-I" + include + "/linux",
                ROOT.resolve("bindings/java/src/test/native/no_memory.c").toString(), "-o", library.toString())
                .inheritIO().start().waitFor());
        System.load(library.toString());
    }

    private static native void withoutReferences(boolean without);

    private static native void withoutThreads(boolean without);

    private static void isThrown(Executable call) {
        assertThrows(OutOfMemoryError.class, () -> {
            withoutReferences(true);
            try {
                call.execute();
            } finally {
                withoutReferences(false);
            }
        });
    }

    /** Waits for a call whose end no thread of Pagoda's can tell. */
    private static void isTold(CompletableFuture<?> call) {
        ExecutionException told = assertThrows(ExecutionException.class, () -> call.get(20, TimeUnit.SECONDS));
        assertInstanceOf(OutOfMemoryError.class, told.getCause());
    }

    private static Engine engine() {
        return Engine.open(FOLDERS.resolve("gather"), new EngineOptions().model(cpu()).kvSize(KvSize.pages(64)));
    }

    @Test
    void withoutReferences() throws Exception {
        RankRequest request = EngineTest.User.of("gather").get(0).request(1, 0, 5);
        try (Engine engine = engine(); Model model = Model.open(HELLO, cpu());
                Tensor x = Tensor.zeros(ElementType.F32, 1, 4); Generator generator = GeneratorTest.open()) {
            isThrown(() -> generator.stream(GeneratorTest.likely(3)).close());
            generator.generateAsync(GeneratorTest.likely(3)).get(20, TimeUnit.SECONDS);
            isThrown(() -> engine.rankAsync(request).get(20, TimeUnit.SECONDS));
            isThrown(() -> model.runAsync(Map.of("x", x), "y").get(20, TimeUnit.SECONDS));
            engine.rankAsync(request).get(20, TimeUnit.SECONDS);
            model.runAsync(Map.of("x", x), "y").get(20, TimeUnit.SECONDS).close();
        }
        ByteBuffer memory = ByteBuffer.allocateDirect(16).order(ByteOrder.nativeOrder());
        isThrown(() -> Tensor.of(ElementType.F32, memory, 4).close());
    }

    /** The log goes where it went before. */
    @Test
    void withoutReferencesToLogHandlers() {
        List<String> lines = new CopyOnWriteArrayList<>();
        AtomicBoolean heard = new AtomicBoolean();
        Pagoda.setLog(LogLevel.DEBUG, (level, source, message) -> lines.add(message));
        try {
            isThrown(() -> Pagoda.setLog(LogLevel.DEBUG, (level, source, message) -> heard.set(true)));
            assertThrows(PagodaException.class, () -> Model.open(Path.of("no such file.onnx")));
            assertTrue(lines.stream().anyMatch(line -> line.contains("no such file.onnx")), lines.toString());
            assertEquals(false, heard.get());
        } finally {
            Pagoda.setLog(LogLevel.OFF, null);
        }
    }

    @Test
    void withoutThreads() throws Exception {
        RankRequest request = EngineTest.User.of("gather").get(0).request(1, 0, 5);
        try (Engine engine = engine(); Model model = Model.open(HELLO, cpu());
                Tensor x = Tensor.zeros(ElementType.F32, 1, 4); Generator generator = GeneratorTest.open()) {
            withoutThreads(true);
            try {
                isTold(generator.generateAsync(GeneratorTest.likely(3)));
                // A token that is lost must not look like the end of the answer.
                CompletionException lost = assertThrows(CompletionException.class,
                        () -> generator.stream(GeneratorTest.likely(3)).iterator().next());
                assertInstanceOf(OutOfMemoryError.class, lost.getCause());
                PublisherTest.Reader reader = new PublisherTest.Reader(Long.MAX_VALUE, 0);
                generator.stream(GeneratorTest.likely(3)).publisher().subscribe(reader);
                assertInstanceOf(OutOfMemoryError.class, reader.failure());
                isTold(engine.rankAsync(request));
                isTold(model.runAsync(Map.of("x", x), "y"));
                // And again: one that was told is not the last.
                isTold(engine.rankAsync(request));
            } finally {
                withoutThreads(false);
            }
            engine.rankAsync(request).get(20, TimeUnit.SECONDS);
            model.runAsync(Map.of("x", x), "y").get(20, TimeUnit.SECONDS).close();
            assertEquals(3, generator.stream(GeneratorTest.likely(3)).tokens().count());
        }
    }
}
