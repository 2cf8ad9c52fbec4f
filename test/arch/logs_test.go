package arch

import (
	"fmt"
	"go/ast"
	"go/token"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// logKeys is the package that creates the fields of log lines.
const logKeys = "internal/log"

// logMethods are those of a *zap.Logger that write, and which of their arguments is the
// message.
var logMethods = map[string]int{
	"Debug": 0, "Info": 0, "Warn": 0, "Error": 0, "DPanic": 0, "Panic": 0, "Fatal": 0, "Log": 1, "Check": 1,
}

// noFields are the functions of zap that make no field.
var noFields = []string{"New", "NewNop", "NewAtomicLevel", "NewAtomicLevelAt", "NewProductionEncoderConfig", "NewDevelopmentEncoderConfig", "NewStdLogAt", "WrapCore"}

// checkLogs: a line of the log has a message that is the same each time, so that it can
// be looked for, and its facts in fields of log.
func checkLogs(t *tree) (problems []string) {
	written := map[string]string{} // message without what may differ -> message
	for _, dir := range t.dirs() {
		p := t.packages[dir]
		texts := p.texts()
		for _, f := range p.code() {
			if dir != logKeys {
				problems = append(problems, f.ownFields()...)
			}
			ast.Inspect(f.syntax, func(n ast.Node) bool {
				call, ok := n.(*ast.CallExpr)
				if !ok || !t.logs(call) {
					return true
				}
				messages, constant := texts.of(call.Args[logMethods[call.Fun.(*ast.SelectorExpr).Sel.Name]])
				if !constant {
					problems = append(problems, fmt.Sprintf("%s: the message of a log line is not a constant: put what differs into a field", f.fset.Position(call.Pos())))
				}
				for _, message := range messages {
					plain := differs.ReplaceAllString(strings.ToLower(message), "*")
					if other, known := written[plain]; known && other != message || strings.Contains(message, "%") {
						problems = append(problems, fmt.Sprintf("%s: %q differs from another message by a value: put that into a field", f.fset.Position(call.Pos()), message))
					}
					written[plain] = message
				}
				return true
			})
		}
	}
	return problems
}

// differs is what values look like in a text.
var differs = regexp.MustCompile(`"[^"]*"|'[^']*'|[0-9]+`)

// ownFields returns the places where a file creates fields without internal/log.
func (f file) ownFields() (problems []string) {
	local, ok := f.imports["go.uber.org/zap"]
	if !ok {
		return nil
	}
	if local == "" {
		local = "zap"
	}
	ast.Inspect(f.syntax, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		if sel, ok := call.Fun.(*ast.SelectorExpr); ok && isName(sel.X, local) && !slices.Contains(noFields, sel.Sel.Name) {
			problems = append(problems, fmt.Sprintf("%s: %s.%s: the fields of log lines are made in %s", f.fset.Position(sel.Pos()), local, sel.Sel.Name, logKeys))
		}
		return true
	})
	return problems
}

// logs reports whether a call writes to a logger. It goes by the names that are declared
// as *zap.Logger somewhere in the tree.
func (t *tree) logs(call *ast.CallExpr) bool {
	sel, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return false
	}
	message, ok := logMethods[sel.Sel.Name]
	return ok && len(call.Args) > message && t.isLogger(sel.X)
}

func (t *tree) isLogger(x ast.Expr) bool {
	switch x := x.(type) {
	case *ast.Ident:
		return t.loggerNames()[x.Name]
	case *ast.SelectorExpr:
		return t.loggerNames()[x.Sel.Name]
	case *ast.CallExpr: // log.With(...).Info(...)
		sel, ok := x.Fun.(*ast.SelectorExpr)
		return ok && (slices.Contains([]string{"With", "Named", "WithOptions"}, sel.Sel.Name) && t.isLogger(sel.X) || t.loggerNames()[sel.Sel.Name])
	}
	return false
}

// loggerNames returns the names of fields, parameters, variables and functions that are
// or return a *zap.Logger.
func (t *tree) loggerNames() map[string]bool {
	if t.loggers != nil {
		return t.loggers
	}
	t.loggers = map[string]bool{}
	for _, p := range t.packages {
		for _, f := range p.code() {
			ast.Inspect(f.syntax, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.Field:
					if isLoggerType(n.Type) {
						t.addLoggers(n.Names...)
					}
				case *ast.ValueSpec:
					if isLoggerType(n.Type) {
						t.addLoggers(n.Names...)
					}
				case *ast.FuncDecl:
					if r := n.Type.Results; r != nil && len(r.List) > 0 && isLoggerType(r.List[0].Type) {
						t.addLoggers(n.Name)
					}
				}
				return true
			})
		}
	}
	for more := true; more; { // a variable that is made from one
		before := len(t.loggers)
		for _, p := range t.packages {
			for _, f := range p.code() {
				ast.Inspect(f.syntax, func(n ast.Node) bool {
					if a, ok := n.(*ast.AssignStmt); ok && a.Tok == token.DEFINE && len(a.Lhs) == len(a.Rhs) {
						for i, from := range a.Rhs {
							if name, ok := a.Lhs[i].(*ast.Ident); ok && t.isLogger(from) {
								t.addLoggers(name)
							}
						}
					}
					return true
				})
			}
		}
		more = len(t.loggers) > before
	}
	return t.loggers
}

func (t *tree) addLoggers(names ...*ast.Ident) {
	for _, name := range names {
		t.loggers[name.Name] = true
	}
}

func isLoggerType(x ast.Expr) bool {
	star, ok := x.(*ast.StarExpr)
	if !ok {
		return false
	}
	sel, ok := star.X.(*ast.SelectorExpr)
	return ok && isName(sel.X, "zap") && sel.Sel.Name == "Logger"
}

func isName(x ast.Expr, name string) bool {
	id, ok := x.(*ast.Ident)
	return ok && id.Name == name
}

// texts are the constants of a package that are one string, and its functions that
// give nothing but such strings.
type texts map[string][]string

func (p *pkg) texts() texts {
	all := texts{}
	for _, f := range p.code() {
		for _, d := range f.syntax.Decls {
			switch d := d.(type) {
			case *ast.GenDecl:
				for _, s := range d.Specs {
					if v, ok := s.(*ast.ValueSpec); ok && d.Tok == token.CONST && len(v.Names) == 1 && len(v.Values) == 1 {
						if text, ok := literal(v.Values[0]); ok {
							all[v.Names[0].Name] = []string{text}
						}
					}
				}
			case *ast.FuncDecl:
				if strs := returned(d); strs != nil && d.Recv == nil {
					all[d.Name.Name+"()"] = strs
				}
			}
		}
	}
	return all
}

// returned returns the strings a function gives; nil when it can give others.
func returned(d *ast.FuncDecl) (strs []string) {
	constant := true
	ast.Inspect(d, func(n ast.Node) bool {
		if r, ok := n.(*ast.ReturnStmt); ok {
			if len(r.Results) != 1 {
				constant = false
				return false
			}
			text, ok := literal(r.Results[0])
			constant = constant && ok
			strs = append(strs, text)
		}
		return true
	})
	if !constant {
		return nil
	}
	return strs
}

// of returns the strings an expression can be; not constant when others too.
func (all texts) of(x ast.Expr) (strs []string, constant bool) {
	if text, ok := literal(x); ok {
		return []string{text}, true
	}
	switch x := x.(type) {
	case *ast.Ident:
		strs = all[x.Name]
	case *ast.CallExpr:
		if id, ok := x.Fun.(*ast.Ident); ok {
			strs = all[id.Name+"()"]
		}
	}
	return strs, strs != nil
}

func literal(x ast.Expr) (string, bool) {
	lit, ok := x.(*ast.BasicLit)
	if !ok || lit.Kind != token.STRING {
		return "", false
	}
	text, err := strconv.Unquote(lit.Value)
	return text, err == nil
}
