package ai.pagoda;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.IntBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.NoSuchElementException;
import java.util.concurrent.CancellationException;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.function.UnaryOperator;
import java.util.stream.IntStream;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

class GeneratorTest extends Support {
    private static GeneratorOptions options() {
        return new GeneratorOptions().model(cpu()).maxBatch(4).kvSize(KvSize.pages(64));
    }

    static Generator open() {
        return Generator.open(LLAMA, options());
    }

    static Generator stepped() {
        return Generator.open(LLAMA, options().driver(Driver.CALLER));
    }

    /** A request for the most likely tokens, which no token ends. */
    static GenerateRequest likely(int count) {
        return new GenerateRequest().tokens(5, 6, 7, 8, 9, 10, 11, 12).doSample(false).ignoreEos(true)
                .maxNewTokens(count);
    }

    private static GenerateRequest drawn(long seed) {
        return likely(12).doSample(true).temperature(1.5f).topK(0).topP(1).seed(seed);
    }

    private static int[] tokens(GenerateResponse response) {
        return response.choices().get(0).tokens();
    }

    @Test
    void oneCallStreamsAndStepsGiveTheSameAnswer() throws Exception {
        try (Generator generator = open(); Generator stepped = stepped()) {
            GenerateRequest request = likely(12).logprobs(2).promptLogprobs(1);
            GenerateResponse whole = generator.generate(request);
            Choice choice = whole.choices().get(0);
            assertEquals(12, choice.tokens().length);
            assertEquals(FinishReason.LENGTH, choice.finishReason());
            assertArrayEquals(new int[] {5, 6, 7, 8, 9, 10, 11, 12}, whole.promptTokens());
            assertTrue(generator.info().contains(whole.version()) && whole.version().length() == 64);
            assertTrue(choice.queued().toNanos() > 0 && choice.queued().compareTo(choice.firstToken()) < 0);
            assertTrue(choice.generation().toNanos() > 0 && whole.computedTokens() > 0);
            assertEquals(8, whole.promptLogprobs().size());
            assertEquals(0, whole.promptLogprobs().get(0).rank());
            assertTrue(whole.promptLogprobs().get(1).rank() > 0 && whole.promptLogprobs().get(1).logprob() < 0);
            for (int i = 0; i < 12; i++) {
                TokenLogprobs logprobs = choice.logprobs().get(i);
                assertEquals(1, logprobs.rank());
                assertEquals(new TopLogprob(choice.tokens()[i], logprobs.logprob()), logprobs.top().get(0));
                assertEquals(2, logprobs.top().size());
            }
            try (TokenStream stream = generator.stream(request)) {
                StringBuilder text = new StringBuilder();
                int read = 0;
                for (Token token : stream) {
                    assertEquals(0, token.choice());
                    assertEquals(choice.tokens()[read], token.id());
                    assertEquals(choice.logprobs().get(read), token.logprobs());
                    assertEquals(++read == 12 ? FinishReason.LENGTH : FinishReason.NONE, token.finishReason());
                    text.append(token.text());
                }
                assertEquals(12, read);
                assertEquals(choice.text(), text.toString());
                assertArrayEquals(choice.tokens(), tokens(stream.response().join()));
                assertFalse(stream.iterator().hasNext());
                assertThrows(NoSuchElementException.class, () -> stream.iterator().next());
            }
            request = likely(12);
            try (Stream<Token> tokens = generator.stream(request).tokens()) {
                List<Token> all = tokens.toList();
                assertArrayEquals(choice.tokens(), all.stream().mapToInt(Token::id).toArray());
                assertNull(all.get(0).logprobs());
            }
            assertArrayEquals(choice.tokens(), tokens(generator.generateAsync(request).get(20, TimeUnit.SECONDS)));
            assertArrayEquals(choice.tokens(), tokens(stepped.generate(request)));
            TokenStream steps = stepped.stream(request);
            int count = 1;
            while (stepped.step()) {
                count++;
            }
            assertEquals(12, count);
            assertArrayEquals(choice.tokens(), steps.tokens().mapToInt(Token::id).toArray());
            assertFalse(stepped.step());
            fails(Status.UNSUPPORTED, "options.driver", generator::step);
        }
    }

    /** Of tests/data/llm/llama, by transformers. */
    @Test
    @SuppressWarnings("unchecked")
    void theFirstTokenIsThatOfTransformers() throws Exception {
        ByteBuffer file = ByteBuffer.wrap(Files.readAllBytes(ROOT.resolve("tests/data/llm/llama/expected.safetensors")))
                .order(ByteOrder.LITTLE_ENDIAN);
        int size = (int) file.getLong();
        byte[] header = new byte[size];
        file.get(header);
        Map<String, Object> tensors = (Map<String, Object>) Json.read(new String(header));
        try (Generator generator = open()) {
            for (int index = 0; index < 2; index++) {
                int[] at = new int[4];
                int number = 0;
                for (String name : List.of("input_ids." + index, "logits." + index)) {
                    for (Object offset : (List<?>) ((Map<String, Object>) tensors.get(name)).get("data_offsets")) {
                        at[number++] = 8 + size + ((Double) offset).intValue();
                    }
                }
                int[] prompt = IntStream.range(0, (at[1] - at[0]) / 4).map(i -> file.getInt(at[0] + 4 * i)).toArray();
                int vocabulary = (at[3] - at[2]) / 4 / prompt.length;
                int last = at[3] - 4 * vocabulary;
                int best = IntStream.range(0, vocabulary).boxed()
                        .max((a, b) -> Float.compare(file.getFloat(last + 4 * a), file.getFloat(last + 4 * b))).get();
                assertEquals(best, tokens(generator.generate(likely(4).tokens(prompt)))[0]);
            }
        }
    }

    @Test
    void manyAnswersAreThoseOfTheirSeed() {
        try (Generator generator = open()) {
            GenerateResponse one = generator.generate(drawn(7).n(4));
            GenerateResponse again = generator.generate(drawn(7).n(4));
            GenerateResponse other = generator.generate(drawn(Long.MIN_VALUE).n(4));
            List<Token> streamed = generator.stream(drawn(7).n(4)).tokens().toList();
            for (int i = 0; i < 4; i++) {
                int choice = i;
                int[] tokens = one.choices().get(i).tokens();
                assertArrayEquals(tokens, again.choices().get(i).tokens());
                assertArrayEquals(tokens,
                        streamed.stream().filter(token -> token.choice() == choice).mapToInt(Token::id).toArray());
                assertFalse(Arrays.equals(tokens, other.choices().get(i).tokens()));
            }
            assertArrayEquals(tokens(generator.generate(drawn(Long.MIN_VALUE))), other.choices().get(0).tokens());
        }
    }

    @Test
    void everyFieldOfARequestReachesTheLibrary() {
        try (Generator generator = open()) {
            UnaryOperator<int[]> sorted = list -> Arrays.stream(list).sorted().distinct().toArray();
            int[] plain = tokens(generator.generate(likely(12)));
            int[] all77 = new int[12];
            Arrays.fill(all77, 77);
            assertArrayEquals(all77, tokens(generator.generate(likely(12).logitBias(77, 1e6f).logitBias(3, 1))));
            int[] forced = plain.clone();
            forced[11] = 2;
            assertArrayEquals(forced, tokens(generator.generate(likely(12).forcedEos(2))));
            assertArrayEquals(new int[] {2},
                    tokens(generator.generate(likely(12).logitBias(2, 1e6f).ignoreEos(false))));
            assertEquals(4, tokens(generator.generate(likely(12).logitBias(2, 1e6f).logitBias(4, -1e30f)
                    .ignoreEos(false).minNewTokens(3))).length);
            Choice stopped = generator.generate(likely(12).stopTokens(plain[5])).choices().get(0);
            assertEquals(plain[5], stopped.tokens()[stopped.tokens().length - 1]);
            assertEquals(FinishReason.STOP, stopped.finishReason());
            assertEquals(12, sorted.apply(tokens(generator.generate(
                    likely(12).logitBias(77, 1e3f).noRepeatNgramSize(1)))).length);
            for (GenerateRequest same : List.of(new GenerateRequest().tokens(5, 6, 7, 8, 9, 10, 11, 12).ignoreEos(true)
                            .maxNewTokens(12).temperature(0), likely(12).doSample(true).topK(1),
                    likely(12).doSample(true).topK(0).topP(0), likely(12).doSample(true).topK(0).topP(1).minP(1))) {
                assertArrayEquals(plain, tokens(generator.generate(same)));
            }
            // Some tokens that are far ahead of the others, and close together.
            List<UnaryOperator<GenerateRequest>> penalties = List.of(r -> r.repetitionPenalty(30),
                    r -> r.presencePenalty(2), r -> r.frequencyPenalty(2));
            for (UnaryOperator<GenerateRequest> penalty : penalties) {
                GenerateRequest some = likely(12);
                for (int token = 70; token < 100; token++) {
                    some.logitBias(token, 30);
                }
                int[] without = tokens(generator.generate(some));
                assertFalse(Arrays.equals(without, tokens(generator.generate(penalty.apply(some)))));
            }
            GenerateRequest special = likely(2).logitBias(2, 1e6f);
            assertEquals("", generator.generate(special).choices().get(0).text());
            assertEquals("</s></s>", generator.generate(special.skipSpecial(false)).choices().get(0).text());
            String yes = "{\"choice\": [\"yes\"]}";
            assertEquals("yes", generator.generate(likely(12).grammar(yes)).choices().get(0).text());
            assertEquals("", generator.generate(likely(12).grammar(yes)).choices().get(0).missing());
            assertEquals("y", generator.generate(likely(12).grammar(yes).stop("no", "e")).choices().get(0).text());
            assertEquals("ye", generator.generate(likely(12).grammar(yes).stop("e").includeStop(true)).choices().get(0)
                    .text());
            String missing = generator.generate(likely(2).grammar("{\"choice\": [\"abcdefgh\"]}")).choices().get(0)
                    .missing();
            assertTrue(missing.startsWith("next is "), missing);
            int[] full = new int[505];
            Arrays.fill(full, 5);
            fails(Status.INVALID_ARGUMENT, "request.max_new_tokens", () -> generator.generate(likely(12).tokens(full)));
            assertEquals(7, tokens(generator.generate(likely(12).tokens(full).contextEnd(ContextEnd.STOP))).length);
        }
    }

    @Test
    void promptsOfAllKinds() {
        try (Generator generator = open()) {
            String words = "the quick brown 狐 fox 🦊";
            int[] tokens = generator.tokenize(new GenerateRequest().prompt(words));
            assertEquals(1, tokens[0]);
            assertEquals(words, generator.detokenize(tokens, true));
            assertEquals("<s>" + words, generator.detokenize(tokens, false));
            assertEquals("", generator.detokenize(new int[0], true));
            GenerateResponse echoed = generator.generate(likely(12).tokens((int[]) null).prompt(words).echo(true));
            assertArrayEquals(tokens, echoed.promptTokens());
            assertTrue(echoed.choices().get(0).text().startsWith(words));
            // Arrays, buffers of both kinds and orders, and a part of one.
            int[] expected = tokens(generator.generate(likely(12).tokens(tokens)));
            IntBuffer direct = ByteBuffer.allocateDirect(4 * tokens.length + 8).order(ByteOrder.nativeOrder())
                    .asIntBuffer().put(1, tokens).position(1).limit(1 + tokens.length);
            IntBuffer swapped = ByteBuffer.allocateDirect(4 * tokens.length).order(ByteOrder.BIG_ENDIAN)
                    .asIntBuffer().put(0, tokens);
            for (IntBuffer buffer : List.of(IntBuffer.wrap(tokens), direct, swapped)) {
                assertArrayEquals(expected, tokens(generator.generate(likely(12).tokens(buffer))));
                assertArrayEquals(expected, generator.stream(likely(12).tokens(buffer)).tokens().mapToInt(Token::id)
                        .toArray());
                assertArrayEquals(tokens, generator.tokenize(likely(12).tokens(buffer)));
            }
            assertEquals(1, direct.position());
            fails(Status.INVALID_ARGUMENT, "request.tokens",
                    () -> generator.generate(likely(12).tokens(direct.duplicate().limit(1))));
            List<Message> chat = List.of(new Message("system", "be \"brief\"\\"), new Message("user", words + "\n\t\0"));
            String written = "<|im_start|>system\nbe \"brief\"\\<|im_end|>\n<|im_start|>user\n" + words
                    + "\n\t\\0<|im_end|>\n";
            int[] whole = generator.tokenize(new GenerateRequest().messages(chat));
            assertEquals(written + "<|im_start|>assistant\n", generator.detokenize(whole, false));
            int[] without = generator.tokenize(new GenerateRequest().messages(Message.json(chat))
                    .addGenerationPrompt(false).tools("[]").variables("{}"));
            assertEquals(written, generator.detokenize(without, false));
            assertArrayEquals(whole, generator.tokenize(new GenerateRequest().messages(chat.toArray(new Message[0]))));
        }
    }

    private static void cancelled(GenerateResponse response) {
        assertEquals(FinishReason.CANCELLED, response.choices().get(0).finishReason());
        assertTrue(tokens(response).length < 480);
    }

    @Test
    void whatEndsARequestReachesIt() throws Exception {
        try (Generator generator = open(); Cancel cancel = new Cancel()) {
            TokenStream closed = generator.stream(likely(480));
            Iterator<Token> iterator = closed.iterator();
            iterator.next();
            closed.close();
            closed.close();
            GenerateResponse response = closed.response().get(20, TimeUnit.SECONDS);
            cancelled(response);
            // What was generated before still follows.
            int read = 1;
            for (; iterator.hasNext(); read++) {
                assertEquals(tokens(response)[read], iterator.next().id());
            }
            assertEquals(tokens(response).length, read);
            // The stream of java.util ends it, too.
            TokenStream other = generator.stream(likely(480));
            try (Stream<Token> tokens = other.tokens()) {
                assertEquals(3, tokens.limit(3).count());
            }
            cancelled(other.response().get(20, TimeUnit.SECONDS));
            // A future that is cancelled is so at once.
            CompletableFuture<GenerateResponse> future = generator.generateAsync(likely(480));
            assertTrue(future.cancel(true));
            assertThrows(CancellationException.class, future::join);
            TokenStream third = generator.stream(likely(480));
            assertTrue(third.response().cancel(true));
            assertThrows(CancellationException.class, () -> third.tokens().count());
            eventually(() -> generator.stats().endedEarly() == 4, () -> generator.stats().toString());
            // A cancel of the request.
            TokenStream given = generator.stream(likely(480).cancel(cancel));
            given.close();
            given.iterator().next();
            assertEquals(4, generator.stats().endedEarly());
            cancel.trigger();
            cancelled(given.response().get(20, TimeUnit.SECONDS));
            cancelled(generator.generate(likely(480).cancel(cancel)));
            // The thread that waits.
            TokenStream waiting = generator.stream(likely(480));
            Thread.currentThread().interrupt();
            assertThrows(CancellationException.class, () -> waiting.tokens().count());
            assertTrue(Thread.interrupted());
            waiting.close();
            assertEquals(0, generator.stats().failed());
        }
        TokenStream[] streams = new TokenStream[3];
        try (Generator generator = Generator.open(LLAMA, options().maxBatch(1))) {
            Arrays.setAll(streams, i -> generator.stream(likely(480)));
        }
        cancelled(streams[2].response().get(20, TimeUnit.SECONDS));
        try (Generator generator = stepped()) {
            assertEquals(FinishReason.TIMEOUT,
                    generator.generate(likely(12).timeout(Duration.ofNanos(1))).choices().get(0).finishReason());
        }
    }

    @Test
    void requestsOfHigherPriorityRunFirst() {
        try (Generator generator = Generator.open(LLAMA, options().driver(Driver.CALLER).maxBatch(1))) {
            TokenStream low = generator.stream(likely(3));
            TokenStream high = generator.stream(likely(3).priority(1));
            while (generator.step()) {
            }
            assertTrue(high.response().join().choices().get(0).firstToken()
                    .compareTo(low.response().join().choices().get(0).firstToken()) < 0);
        }
    }

    @Test
    void sessionsGoOnAfterARestart(@TempDir Path folder) {
        int[] turn = IntStream.range(0, 70).map(i -> 5 + i % 9).toArray();
        GenerateRequest request = likely(10).tokens(turn).session("a");
        GeneratorOptions stored = options().storePath(folder.resolve("store")).storeOptions(new StoreOptions());
        try (Generator generator = Generator.open(LLAMA, stored)) {
            assertEquals(0, generator.generate(request).cachedTokens());
        }
        try (Generator generator = Generator.open(LLAMA, stored)) {
            assertTrue(generator.generate(request).cachedTokens() >= 64);
            assertEquals(1, generator.unload("a", "never"));
            assertEquals(1, generator.prefetch("a", "never"));
            assertEquals(1, generator.forget("a", "never"));
            assertEquals(0, generator.forget());
            assertEquals(0, generator.generate(request).cachedTokens());
            assertTrue(generator.clear(false) >= 1);
            assertEquals(0, generator.kvStats().residentOwners());
            assertTrue(generator.generate(request).cachedTokens() > 0);
            assertTrue(generator.clear(true) >= 1);
            assertEquals(0, generator.generate(request).cachedTokens());
            assertThrows(IllegalArgumentException.class, () -> generator.forget("\0"));
        }
        for (boolean shared : new boolean[] {true, false}) {
            try (Generator generator = Generator.open(LLAMA, options().sharePrefixes(shared))) {
                generator.generate(likely(2).tokens(turn));
                assertEquals(shared, generator.generate(likely(2).tokens(turn)).cachedTokens() > 0);
            }
        }
    }

    @Test
    void policiesAndFormats() {
        int[] prompt = IntStream.range(0, 300).map(i -> 5 + i * 7 % 250).toArray();
        KvPolicy h2o = new KvPolicy("h2o").cacheLength(64).chunkSize(64).gracePeriod(0).keepInitialFraction(0.05f)
                .normalise(false).scoreShare(0.5f).protectFirstMessage(false);
        int[] chosen;
        try (Generator generator = Generator.open(LLAMA, options().kvPolicy(h2o))) {
            int[] heavy = tokens(generator.generate(likely(12).tokens(prompt)));
            chosen = tokens(generator.generate(likely(12).tokens(prompt).kvPolicy(new KvPolicy("lastrec").protect(3))));
            assertNotEquals(Arrays.toString(heavy), Arrays.toString(chosen));
            fails(Status.UNSUPPORTED, "request.kv_policy.cache_length",
                    () -> generator.generate(likely(12).tokens(prompt).kvPolicy(new KvPolicy("h2o").cacheLength(32))));
        }
        KvPolicy recent = new KvPolicy("lastrec").cacheLengths(64, 64).protect(3);
        try (Generator generator = Generator.open(LLAMA, options().kvPolicy(recent))) {
            assertArrayEquals(chosen, tokens(generator.generate(likely(12).tokens(prompt))));
        }
        fails(Status.INVALID_ARGUMENT, "options.kv_policy.name",
                () -> Generator.open(LLAMA, options().kvPolicy(new KvPolicy("best").cacheLength(64))));
        try (Generator generator = Generator.open(LLAMA, options().kvFormat(KvFormat.INT8))) {
            assertEquals(12, tokens(generator.generate(likely(12).tokens(prompt))).length);
        }
    }

    @Test
    void draftsChangeNoToken() {
        int[] repeated = IntStream.range(0, 48).map(i -> 5 + i % 8).toArray();
        GenerateRequest request = likely(60).tokens(repeated);
        int[] expected;
        try (Generator plain = open()) {
            expected = tokens(plain.generate(request));
            assertEquals(0, plain.stats().drafts());
            assertArrayEquals(expected, tokens(plain.generate(likely(60).tokens(repeated).maxDraft(8))));
            assertTrue(plain.stats().drafts() > 0);
        }
        for (Path model : Arrays.asList(null, LLAMA)) {
            GeneratorOptions drafting = options().maxDraft(4).draftModel(model).draftKvBytes(1 << 20);
            try (Generator generator = Generator.open(LLAMA, drafting)) {
                assertArrayEquals(expected, tokens(generator.generate(likely(60).tokens(repeated).maxDraft(0))));
                assertEquals(0, generator.stats().drafts());
                assertArrayEquals(expected, tokens(generator.generate(request)));
                GeneratorStats stats = generator.stats();
                assertTrue(stats.drafts() > 0 && stats.drafts() <= stats.draftedTokens(), stats.toString());
                assertTrue(stats.acceptedTokens() <= stats.draftedTokens(), stats.toString());
                generator.setSpeculation(false);
                generator.generate(request);
                assertEquals(stats.drafts(), generator.stats().drafts());
                generator.setSpeculation(true);
                generator.generate(request);
                assertTrue(generator.stats().drafts() > stats.drafts());
                generator.setSpeculation(false, true);
                assertArrayEquals(expected, tokens(generator.generate(request)));
                stats = generator.stats();
                assertEquals(0, stats.drafts() + stats.draftedTokens() + stats.acceptedTokens());
            }
        }
    }

    @Test
    void beamsAreTheBestAnswersWithTheirScores() {
        try (Generator generator = open()) {
            Choice plain = generator.generate(likely(12)).choices().get(0);
            assertNull(plain.score());
            BeamOptions one = new BeamOptions().width(1).earlyStop(EarlyStop.WHEN_FULL);
            Choice same = generator.generate(likely(12).beams(one)).choices().get(0);
            assertArrayEquals(plain.tokens(), same.tokens());
            assertTrue(same.score() < 0);
            for (float penalty : new float[] {1, -2}) {
                BeamOptions beams = new BeamOptions().earlyStop(EarlyStop.NEVER);
                GenerateRequest request =
                        likely(12).n(4).logprobs(0).beams(penalty == 1 ? beams : beams.lengthPenalty(penalty));
                List<Choice> found = generator.generate(request).choices();
                assertEquals(4, found.size());
                float last = Float.POSITIVE_INFINITY;
                for (Choice choice : found) {
                    double sum = choice.logprobs().stream().mapToDouble(TokenLogprobs::logprob).sum();
                    double score = sum / Math.pow(choice.tokens().length, penalty);
                    assertEquals(score, choice.score(), Math.abs(score) * 1e-3);
                    assertTrue(choice.score() <= last, choice.score() + " after " + last);
                    last = choice.score();
                }
            }
            fails(Status.INVALID_ARGUMENT, "request.beams.width",
                    () -> generator.generate(likely(12).beams(new BeamOptions().width(17))));
        }
    }

    @Test
    void whatIsKnownOfAGenerator() {
        try (Generator generator = stepped()) {
            GenerateResponse response = generator.generate(likely(12));
            GeneratorStats stats = generator.stats();
            assertEquals(1, stats.answered());
            assertEquals(12, stats.generatedTokens());
            assertEquals(response.computedTokens(), stats.computedTokens());
            assertEquals(64, generator.kvStats().pages());
            assertEquals(new EngineProvider(Provider.CPU, -1, ""), generator.provider());
            assertTrue(generator.info().contains("\"kind\": \"generate\""));
        }
    }

    @Test
    void requestsThatCanNotBe() {
        try (Generator generator = Generator.open(LLAMA, options().maxPromptTokens(100).maxNewTokens(20))) {
            record Bad(String argument, UnaryOperator<GenerateRequest> change) {}
            for (Bad bad : List.of(new Bad("request.prompt", r -> r.tokens((int[]) null)),
                    new Bad("request.tokens", r -> r.prompt("a")),
                    new Bad("request.tokens", r -> r.tokens()),
                    new Bad("request.tokens[1]", r -> r.tokens(5, 300)),
                    new Bad("request.messages", r -> r.tokens((int[]) null).messages("[{")),
                    new Bad("request.tools", r -> r.tools("[]")),
                    new Bad("request.max_new_tokens", r -> r.maxNewTokens(21)),
                    new Bad("request.top_p", r -> r.topP(1.5f)),
                    new Bad("request.frequency_penalty", r -> r.frequencyPenalty(Float.NaN)),
                    new Bad("request.logit_bias[1]", r -> r.logitBias(1, 1).logitBias(272, 1)),
                    new Bad("request.stop", r -> r.stop("")),
                    new Bad("request.stop_tokens", r -> r.stopTokens(272)),
                    new Bad("request.n", r -> r.n(0)),
                    new Bad("request.grammar.verse", r -> r.grammar("{\"verse\": 1}")))) {
                for (int way = 0; way < 3; way++) {
                    int now = way;
                    fails(Status.INVALID_ARGUMENT, bad.argument, () -> {
                        GenerateRequest request = bad.change.apply(likely(12));
                        Object made = now == 0 ? generator.generate(request)
                                : now == 1 ? generator.generateAsync(request) : generator.stream(request);
                        assertNull(made);
                    });
                }
            }
            fails(Status.UNSUPPORTED, "request.kv_policy",
                    () -> generator.generate(likely(12).kvPolicy(new KvPolicy("lastrec"))));
            List<UnaryOperator<GenerateRequest>> negative = List.of(r -> r.maxNewTokens(-1), r -> r.minNewTokens(-1),
                    r -> r.temperature(-1), r -> r.topK(-1), r -> r.topP(-1), r -> r.minP(-1),
                    r -> r.repetitionPenalty(-1), r -> r.noRepeatNgramSize(-1), r -> r.forcedEos(-1),
                    r -> r.logprobs(-1), r -> r.promptLogprobs(-1), r -> r.timeout(Duration.ofNanos(-1)));
            for (UnaryOperator<GenerateRequest> change : negative) {
                assertThrows(IllegalArgumentException.class, () -> change.apply(likely(12)));
            }
            List<UnaryOperator<GenerateRequest>> nul = List.of(r -> r.prompt("\0"), r -> r.stop("a", "\0"),
                    r -> r.session("\0"), r -> r.grammar("\0"), r -> r.messages("\0"), r -> r.prompt("\ud800"));
            for (UnaryOperator<GenerateRequest> change : nul) {
                assertThrows(IllegalArgumentException.class, () -> generator.generate(change.apply(likely(12))));
            }
            assertThrows(NullPointerException.class, () -> generator.generate(null));
            assertThrows(NullPointerException.class, () -> generator.stream(null));
            assertThrows(NullPointerException.class, () -> generator.detokenize(null, true));
            assertThrows(NullPointerException.class, () -> generator.forget((String) null));
            assertThrows(NullPointerException.class, () -> likely(1).contextEnd(null));
            assertThrows(NullPointerException.class, () -> new Message("user", null));
            assertEquals(12, tokens(generator.generate(likely(12))).length);
        }
        record Bad(String argument, UnaryOperator<GeneratorOptions> change) {}
        for (Bad bad : List.of(new Bad("options.max_batch", o -> o.maxBatch(0)),
                new Bad("options.max_batch_tokens", o -> o.maxBatchTokens(0)),
                new Bad("options.max_stretch", o -> o.maxStretch(1.01f)),
                new Bad("options.max_prompt_tokens", o -> o.maxPromptTokens(-1)),
                new Bad("options.max_new_tokens", o -> o.maxNewTokens(-1)),
                new Bad("options.queue", o -> o.queue(-1)))) {
            fails(Status.INVALID_ARGUMENT, bad.argument, () -> Generator.open(LLAMA, bad.change.apply(options())));
        }
        assertThrows(IllegalArgumentException.class, () -> options().hostBytes(-1));
        fails(Status.CAPACITY, "options.host_bytes", () -> Generator.open(LLAMA, options().hostBytes(Long.MAX_VALUE)));
        fails(Status.NOT_FOUND, "folder", () -> Generator.open(Path.of("/nowhere")));
        assertSame(Status.UNSUPPORTED, assertThrows(PagodaException.class,
                () -> Generator.open(FOLDERS.resolve("gather"))).status());
    }

    @Test
    void whatWasClosedSaysSo() {
        Generator generator = open();
        generator.close();
        generator.close();
        List<Runnable> uses = new ArrayList<>(List.of(() -> generator.generate(likely(1)),
                () -> generator.generateAsync(likely(1)), () -> generator.stream(likely(1)), generator::step,
                () -> generator.tokenize(likely(1)), () -> generator.detokenize(new int[1], true),
                () -> generator.forget("a"), () -> generator.unload("a"), () -> generator.prefetch("a"),
                () -> generator.clear(true)));
        uses.addAll(List.of(generator::provider, generator::info, generator::stats, generator::kvStats));
        for (Runnable use : uses) {
            fails(Status.INVALID_HANDLE, "", use::run);
        }
    }
}
