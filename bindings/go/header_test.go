package pagoda_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// What of the header this package does without, and why.
var without = map[string]string{}

// What this package does not have yet, by how the names begin: generators get bindings of all languages at once.
var notYet = regexp.MustCompile(`(?i)^pagoda_(generat|beam_options|early_stop|logit_bias|token_logprobs|driver|kv_format|kv_policy|context_end|finish_reason)`)

func read(t *testing.T, path string) string {
	t.Helper()
	return string(must[[]byte](t)(os.ReadFile(path)))
}

// sources is all code of the package, without comments.
func sources(t *testing.T) string {
	t.Helper()
	var all strings.Builder
	for _, pattern := range []string{"*.go", "bridge.[ch]"} {
		for _, path := range must[[]string](t)(filepath.Glob(pattern)) {
			if !strings.HasSuffix(path, "_test.go") {
				all.WriteString(read(t, path))
			}
		}
	}
	return regexp.MustCompile(`(?s)/\*.*?\*/|//[^\n]*`).ReplaceAllString(all.String(), "")
}

func TestTheHeaderIsTheLibrarys(t *testing.T) {
	if _, err := os.Stat(root + "/Cargo.toml"); err != nil {
		t.Skip("this module is not in Pagoda's repository")
	}
	if read(t, "include/pagoda.h") != read(t, root+"/include/pagoda.h") {
		t.Error("bindings/go/include/pagoda.h is not include/pagoda.h: run `make header`")
	}
}

func TestEverythingOfTheHeaderIsUsed(t *testing.T) {
	header, code := read(t, "include/pagoda.h"), sources(t)
	find := func(pattern string) (names []string) {
		for _, match := range regexp.MustCompile(pattern).FindAllStringSubmatch(header, -1) {
			names = append(names, match[1])
		}
		return names
	}
	functions := find(`(?m)^[a-z_0-9]+ \*?(?:const )?\*?(pagoda_\w+)\(`)
	functions = append(functions, find(`(?m)^const char \*(pagoda_\w+)\(`)...)
	if listed := strings.Fields(read(t, root+"/tests/exports.txt")); len(functions) != len(listed) {
		t.Errorf("%d functions were found in the header, and the library exports %d", len(functions), len(listed))
	}
	constants := find(`(?m)^#define (PAGODA_\w+) `)
	// The guard of the header has no value.
	if all := strings.Count(header, "\n#define "); len(constants) != all-1 {
		t.Errorf("%d constants were found, of %d", len(constants), all-1)
	}
	for _, name := range functions {
		used := regexp.MustCompile(`\b` + name + `\(`).MatchString(code)
		if notYet.MatchString(name) {
			if used {
				t.Errorf("%s is used: it need not be left out any more", name)
			}
			continue
		}
		if reason, left := without[name]; used == left {
			t.Errorf("%s: used is %v, and the reason to do without it is %q", name, used, reason)
		}
	}
	for _, name := range constants {
		if !notYet.MatchString(name) && !regexp.MustCompile(`\b`+name+`\b`).MatchString(code) {
			t.Errorf("%s has no name in Go", name)
		}
	}
}

func TestEveryFieldOfTheHeaderIsUsed(t *testing.T) {
	code := sources(t)
	// The INIT sets the size of a struct.
	given := map[string]bool{"struct_size": true}
	structs := regexp.MustCompile(`(?s)typedef struct \{(.*?)\} (pagoda_\w+);`)
	comments := regexp.MustCompile(`(?s)/\*.*?\*/`)
	count := 0
	for _, match := range structs.FindAllStringSubmatch(read(t, "include/pagoda.h"), -1) {
		if notYet.MatchString(match[2]) {
			continue
		}
		body := comments.ReplaceAllString(match[1], "")
		for _, field := range regexp.MustCompile(`(\w+);`).FindAllStringSubmatch(body, -1) {
			count++
			if name := field[1]; !given[name] && !regexp.MustCompile(`\._?`+name+`\b`).MatchString(code) {
				t.Errorf("%s.%s is not used", match[2], name)
			}
		}
	}
	if count < 100 {
		t.Errorf("only %d fields were found", count)
	}
}
