package ai.pagoda;

import java.io.IOException;
import java.io.InputStream;
import java.net.URISyntaxException;
import java.nio.file.FileSystemNotFoundException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.CodeSource;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;

/** Finds the native part: by a system property, beside the jar, in its resources, or on the library path. */
final class Loader {
    private static final String PROPERTY = "pagoda.native.dir";
    private static final String LIBRARY = "libpagoda_jni.so";
    /** What a jar may bring; the native part looks for the others beside itself. ONNX Runtime may be elsewhere. */
    private static final List<String> FILES = List.of("libpagoda.so.1", "libonnxruntime.so.1", LIBRARY);

    private final List<String> tried = new ArrayList<>();

    private Loader() {}

    static void load() {
        new Loader().find();
    }

    private void find() {
        String folder = System.getProperty(PROPERTY);
        if (folder != null) {
            // Who names a folder means that one: passing over it would load another library than was asked for.
            if (!loaded(Path.of(folder))) {
                throw failed("the system property " + PROPERTY + " names a folder without it");
            }
            return;
        }
        if (!besideJar() && !inResources() && !onPath()) {
            throw failed("put it into one of these places, or name its folder with -D" + PROPERTY + "=...");
        }
    }

    private boolean loaded(Path folder) {
        Path file = folder.resolve(LIBRARY).toAbsolutePath().normalize();
        tried.add(file.toString());
        if (!Files.isRegularFile(file)) {
            return false;
        }
        System.load(file.toString());
        return true;
    }

    /** Beside the jar, or, as an installed Pagoda has it, in lib where the jar is in share/java. */
    private boolean besideJar() {
        Path jar = jar();
        if (jar == null) {
            tried.add("beside the jar, but that is not a file");
            return false;
        }
        Path folder = Files.isDirectory(jar) ? jar : jar.getParent();
        return loaded(folder) || loaded(folder.resolve("../../lib"));
    }

    /** The file that this class came from; null if it is none, as a jar within another one. */
    private static Path jar() {
        CodeSource source = Loader.class.getProtectionDomain().getCodeSource();
        try {
            return source == null || source.getLocation() == null ? null : Path.of(source.getLocation().toURI());
        } catch (URISyntaxException | IllegalArgumentException | FileSystemNotFoundException notAFile) {
            return null;
        }
    }

    private boolean inResources() {
        String place = "/ai/pagoda/native/linux-" + System.getProperty("os.arch").toLowerCase(Locale.ROOT) + "/";
        tried.add("the jar's resource " + place + LIBRARY);
        if (Loader.class.getResource(place + LIBRARY) == null) {
            return false;
        }
        try {
            Path folder = Files.createTempDirectory("pagoda-");
            // ONNX Runtime is loaded with the first model, so the files stay to the end.
            Runtime.getRuntime().addShutdownHook(new Thread(() -> remove(folder)));
            for (String file : FILES) {
                try (InputStream from = Loader.class.getResourceAsStream(place + file)) {
                    if (from != null) {
                        Files.copy(from, folder.resolve(file));
                    }
                }
            }
            return loaded(folder);
        } catch (IOException error) {
            UnsatisfiedLinkError failed = failed("it could not be unpacked: " + error);
            failed.initCause(error);
            throw failed;
        }
    }

    private static void remove(Path folder) {
        try {
            for (String file : FILES) {
                Files.deleteIfExists(folder.resolve(file));
            }
            Files.deleteIfExists(folder);
        } catch (IOException error) {
            // The process ends: there is nothing left to report to.
        }
    }

    private boolean onPath() {
        tried.add("java.library.path: " + System.getProperty("java.library.path"));
        try {
            System.loadLibrary("pagoda_jni");
            return true;
        } catch (UnsatisfiedLinkError error) {
            // One that is there and can not be loaded says more than that it was not found.
            if (error.getMessage() != null && error.getMessage().contains("java.library.path")) {
                return false;
            }
            throw error;
        }
    }

    private UnsatisfiedLinkError failed(String what) {
        return new UnsatisfiedLinkError(
                LIBRARY + " is not there: " + what + ". Looked for: " + String.join("; ", tried));
    }
}
