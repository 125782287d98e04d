package ai.pagoda;

import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/** Reads the JSON of tests/data: maps, lists, numbers, and texts without escapes. */
final class Json {
    private final String text;
    private int at;

    private Json(String text) {
        this.text = text;
    }

    static Object read(String text) {
        return new Json(text).value();
    }

    private Object value() {
        switch (next()) {
            case '{':
                Map<String, Object> map = new LinkedHashMap<>();
                for (at++; next() != '}'; skip(',')) {
                    String key = (String) value();
                    skip(':');
                    map.put(key, value());
                }
                at++;
                return map;
            case '[':
                List<Object> list = new ArrayList<>();
                for (at++; next() != ']'; skip(',')) {
                    list.add(value());
                }
                at++;
                return list;
            case '"':
                int end = text.indexOf('"', at + 1);
                String found = text.substring(at + 1, end);
                at = end + 1;
                return found;
            default:
                int from = at;
                while ("+-.eE0123456789".indexOf(text.charAt(at)) >= 0) {
                    at++;
                }
                return Double.valueOf(text.substring(from, at));
        }
    }

    private char next() {
        while (Character.isWhitespace(text.charAt(at))) {
            at++;
        }
        return text.charAt(at);
    }

    private void skip(char mark) {
        if (next() == mark) {
            at++;
        }
    }
}
