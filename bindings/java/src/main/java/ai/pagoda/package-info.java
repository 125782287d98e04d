/**
 * Pagoda: inference for models that remember.
 *
 * <pre>{@code
 * try (Engine engine = Engine.open(Path.of("model"))) {
 *     RankResponse response = engine.rank(new RankRequest(7)
 *             .events("movie", 17, 4).events("rating", 5, 3)
 *             .candidates("movie", 8, 15, 16));
 *     float first = response.score(0, 0);
 * }
 *
 * try (Generator generator = Generator.open(Path.of("language-model"));
 *         TokenStream stream = generator.stream(new GenerateRequest().messages(new Message("user", "Hello")))) {
 *     for (Token token : stream) {
 *         System.out.print(token.text());
 *     }
 * }
 * }</pre>
 *
 * <ul>
 * <li>Everything here may be used from any thread, unless it says otherwise; options and requests are for one thread at
 * a time.
 * <li>The caller closes the objects that it makes, best by {@code try}-with-resources. One that is forgotten is closed
 * some time after it can not be reached any more, with a warning in the system logger {@code ai.pagoda}. Using a closed
 * object is a {@link ai.pagoda.PagodaException}, never a crash.
 * <li>What fails throws {@link ai.pagoda.PagodaException}, with the status of {@code pagoda.h} and the argument at
 * fault; a {@code null} where none may be throws {@link java.lang.NullPointerException}.
 * <li>Users, versions and item keys of {@code pagoda.h} are unsigned: the bits of a {@code long}.
 * </ul>
 */
package ai.pagoda;
