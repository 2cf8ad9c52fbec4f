package safety

import (
	"io/fs"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// message is a place in the source of amdgpu that prints to the kernel log.
type message struct {
	call string // what prints: dev_err, DRM_ERROR, RAS_EVENT_LOG
	// text is the format with what dev_fmt and pr_fmt of its file put before it, without the
	// ends of lines; "" if it is not a literal.
	text     string
	file     string // from drivers/gpu/drm/amd on
	function string // or macro
}

// folders are those of drivers/gpu/drm/amd that are read. The others: displays and their audio,
// the platform devices of partitions, definitions of registers, and the settings of clocks,
// voltages and fans (pm but for the messages to the SMU).
var folders = []string{"amdgpu", "amdkfd", "pm/powerplay/smumgr", "pm/swsmu", "ras"}

// extract returns the messages of a kernel tree, in order of files and lines.
func extract(tree fs.FS) (all []message, err error) {
	const root = "drivers/gpu/drm/amd/"
	for _, folder := range folders {
		if _, err := fs.Stat(tree, root+folder); err != nil && folder == "ras" {
			continue // 6.12 has none
		}
		err := fs.WalkDir(tree, root+folder, func(name string, d fs.DirEntry, err error) error {
			if err != nil || path.Ext(name) != ".c" && path.Ext(name) != ".h" {
				return err
			}
			source, err := fs.ReadFile(tree, name)
			all = append(all, messagesOf(strings.TrimPrefix(name, root), string(source))...)
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	return all, nil
}

var (
	// lexeme is a comment, a directive other than define, a literal, a word or one other character.
	lexeme = regexp.MustCompile(`(?sm)/\*.*?\*/|//[^\n]*|^[ \t]*#[ \t]*(?:define|[^\n]*)|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|[A-Za-z_]\w*|.`)
	word   = regexp.MustCompile(`^[A-Za-z_]\w*$`)
	// printer is the name of a function or macro that prints.
	printer = regexp.MustCompile(`^(?:` +
		`(?:dev|pr|drm|drm_file)_(?:emerg|alert|crit|err|warn|notice|info|dbg|debug|printk)(?:_[a-z]+)*` +
		`|DRM_(?:DEV_)?(?:ERROR|WARN|NOTE|INFO|DEBUG)(?:_[A-Z]+)*` +
		`|RAS_EVENT_LOG|RAS_(?:DEV_)?(?:ERR|WARN|INFO|DBG)(?:_[A-Z]+)*` +
		`|__smu_msg_v1_print_err_limited|(?:dev_|drm_)?WARN(?:_ONCE|_RATELIMITED)?|printk(?:_[a-z]+)?|PP_ASSERT(?:_WITH_CODE)?|PP_DBG_LOG` +
		`)$`)
	ends = regexp.MustCompile(`(?:\\n|\s)+$`)
	// ownFormat is a file's own dev_fmt or pr_fmt.
	ownFormat = regexp.MustCompile(`(?m)^#define (dev|pr)_fmt\(fmt\)\s+"([^"]*)" fmt`)
)

// messagesOf returns the messages of a file. It knows the kernel's style: the braces of a
// function are in the first column.
func messagesOf(file, source string) (found []message) {
	prefix := map[string]string{}
	for _, m := range ownFormat.FindAllStringSubmatch(source, -1) {
		prefix[m[1]] = m[2]
	}
	source = strings.ReplaceAll(source, "\\\n", "")
	var tokens, where []string // lexemes, and the function that each is in
	function := ""
	for _, span := range lexeme.FindAllStringIndex(source, -1) {
		t := source[span[0]:span[1]]
		first := span[0] == 0 || source[span[0]-1] == '\n'
		switch d := strings.TrimSpace(t); {
		case d == "", strings.HasPrefix(d, "/*"), strings.HasPrefix(d, "//"), strings.HasPrefix(d, "#"):
			continue
		case first && t == "{":
			function = functionOf(tokens)
		case first && t == "}":
			function = ""
		}
		tokens, where = append(tokens, t), append(where, function)
	}
	for i, t := range tokens[:max(0, len(tokens)-1)] {
		if !printer.MatchString(t) || tokens[i+1] != "(" {
			continue
		}
		texts := formatsOf(arguments(tokens[i+2:]))
		if texts == nil && where[i] == "" {
			continue // the definition of a macro
		}
		kind, _, _ := strings.Cut(t, "_")
		for _, text := range texts {
			text = prefix[kind] + strings.ReplaceAll(ends.ReplaceAllString(text, ""), `\"`, `"`)
			found = append(found, message{call: t, text: text, file: file, function: where[i]})
		}
		if texts == nil {
			found = append(found, message{call: t, file: file, function: where[i]})
		}
	}
	return found
}

// functionOf returns the name of the function whose parameters end tokens; "" if they do not.
// After them may be attributes, with arguments of their own and names with two underscores.
func functionOf(tokens []string) (name string) {
	for end := len(tokens); end > 0 && tokens[end-1] == ")"; {
		for depth := 0; end > 0; {
			end--
			switch tokens[end] {
			case ")":
				depth++
			case "(":
				depth--
			}
			if depth == 0 {
				break
			}
		}
		if end == 0 || !word.MatchString(tokens[end-1]) {
			break
		}
		end--
		if name = tokens[end]; !strings.HasPrefix(name, "__") {
			break
		}
	}
	return name
}

// arguments splits what follows an opening parenthesis at its commas.
func arguments(tokens []string) (split [][]string) {
	depth, begin := 1, 0
	for i, t := range tokens {
		switch t {
		case "(", "{", "[":
			depth++
		case ")", "}", "]":
			depth--
		}
		if depth == 0 || depth == 1 && t == "," {
			split = append(split, tokens[begin:i])
			begin = i + 1
		}
		if depth == 0 {
			break
		}
	}
	return split
}

// formatsOf returns the literals of the first argument that begins with one or with a word
// before one, such as KERN_ERR: several for a choice between literals.
func formatsOf(arguments [][]string) (texts []string) {
	literal := func(t string) bool { return strings.HasPrefix(t, `"`) }
	for _, a := range arguments {
		choice := slices.Contains(a, "?")
		if len(a) == 0 || !literal(a[0]) && !(len(a) > 1 && word.MatchString(a[0]) && literal(a[1])) && !choice {
			continue
		}
		joined := false
		for _, t := range a {
			switch {
			case !literal(t):
				joined = false
			case joined:
				texts[len(texts)-1] += strings.Trim(t, `"`)
			default:
				texts, joined = append(texts, strings.Trim(t, `"`)), true
			}
		}
		if texts != nil {
			return texts
		}
	}
	return nil
}

func TestMessagesOfASourceAreFound(t *testing.T) {
	const source = `#define pr_fmt(fmt) "kfd2kgd: " fmt
#define dev_fmt(fmt) "kfd_x: %s: " fmt, __func__

/* dev_err(dev, "a comment"); */
#define RAS_DEV_ERR(device, fmt, ...) \
	dev_err(device, fmt, ##__VA_ARGS__)
#define WRITE(reg) do { \
		pr_err("timeout: " #reg " failed %d\n", r); \
	} while (0)

static const struct funcs f =
{
	.set = set,
};

int __attribute__((cold)) first(struct device *dev, int (*get)(int))
	__must_hold(lock)
{
	if (x)
		dev_err_ratelimited(dev, "two "
			"literals: %d\n", get(1));
	dev_dbg(dev, "quiet (%s)\n", "no format");
	printk(KERN_ERR "a level\n");
	WARN(a && b(c, d), "after a condition\n");
#if A
	DRM_ERROR("a %s\n", yes ? "yes" : "no");
#else
	drm_info(d, yes ? "on\n" : "off\n");
#endif
	dev_err(dev, fmt, 1);
}

static void __second(void)
{
	RAS_EVENT_LOG(adev, id, HW_ERR "say \"x\" \n\n");
}
`
	want := []message{
		{"pr_err", "kfd2kgd: timeout:", "f.c", ""},
		{"pr_err", "kfd2kgd:  failed %d", "f.c", ""},
		{"dev_err_ratelimited", "kfd_x: %s: two literals: %d", "f.c", "first"},
		{"dev_dbg", "kfd_x: %s: quiet (%s)", "f.c", "first"},
		{"printk", "a level", "f.c", "first"},
		{"WARN", "after a condition", "f.c", "first"},
		{"DRM_ERROR", "a %s", "f.c", "first"},
		{"drm_info", "on", "f.c", "first"},
		{"drm_info", "off", "f.c", "first"},
		{"dev_err", "", "f.c", "first"},
		{"RAS_EVENT_LOG", `say "x"`, "f.c", "__second"},
	}
	if diff := cmp.Diff(want, messagesOf("f.c", source), cmp.AllowUnexported(message{})); diff != "" {
		t.Errorf("messages (-want +got):\n%s", diff)
	}
}
