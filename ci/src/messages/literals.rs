//! Finds texts in a Rust file.

use anyhow::Result;
use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, ExprMethodCall, ImplItemFn, Item, LitStr, Macro};

/// Where a text is shown.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Kind {
    Error,
    Log,
    Other,
}

impl Kind {
    pub(super) const fn heading(self) -> &'static str {
        match self {
            Self::Error => "Errors",
            Self::Log => "Log messages",
            Self::Other => "What commands and calls answer",
        }
    }
}

/// A text that someone can read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Message {
    pub(super) kind: Kind,
    pub(super) text: String,
}

/// Macros whose text is a log message.
const LOGS: [&str; 5] = ["trace", "debug", "info", "warn", "error"];
/// Macros whose text is an error.
const ERRORS: [&str; 3] = ["bail", "ensure", "anyhow"];
/// Macros whose text is seen by developers only: the program has a defect.
const DEFECTS: [&str; 10] = [
    "assert",
    "assert_eq",
    "assert_ne",
    "debug_assert",
    "debug_assert_eq",
    "debug_assert_ne",
    "panic",
    "todo",
    "unimplemented",
    "unreachable",
];

/// The texts of a file, in order.
///
/// # Errors
/// The file is no Rust.
pub(super) fn of_file(text: &str) -> Result<Vec<Message>> {
    let mut finder = Finder { found: Vec::new() };
    finder.visit_file(&syn::parse_file(text)?);
    Ok(finder.found)
}

struct Finder {
    found: Vec<Message>,
}

impl Finder {
    fn add(&mut self, kind: Kind, literal: &LitStr) {
        let text = literal.value();
        // Several words, of which one begins with a letter.
        let words = text.split_whitespace().filter(|word| word.contains(char::is_alphabetic));
        if words.count() > 1 {
            let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
            self.found.push(Message { kind, text });
        }
    }

    fn add_all(&mut self, kind: Kind, tokens: TokenStream) {
        for token in tokens {
            match token {
                TokenTree::Literal(literal) => {
                    if let Ok(text) = syn::parse_str::<LitStr>(&literal.to_string()) {
                        self.add(kind, &text);
                    }
                }
                TokenTree::Group(group) => self.add_all(kind, group.stream()),
                TokenTree::Ident(_) | TokenTree::Punct(_) => {}
            }
        }
    }
}

/// Whether an item is built for tests only.
fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let cfg = || attribute.parse_args::<syn::Ident>().is_ok_and(|name| name == "test");
        attribute.path().is_ident("test") || (attribute.path().is_ident("cfg") && cfg())
    })
}

impl<'ast> Visit<'ast> for Finder {
    fn visit_item(&mut self, item: &'ast Item) {
        let attributes = match item {
            Item::Fn(item) => &item.attrs,
            Item::Impl(item) => &item.attrs,
            Item::Mod(item) => &item.attrs,
            _ => return visit::visit_item(self, item),
        };
        if !is_test(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast ImplItemFn) {
        if !is_test(&item.attrs) {
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        if attribute.path().is_ident("error")
            && let syn::Meta::List(list) = &attribute.meta
        {
            self.add_all(Kind::Error, list.tokens.clone());
        }
    }

    fn visit_macro(&mut self, called: &'ast Macro) {
        let name = called.path.segments.last().map(|one| one.ident.to_string());
        let name = name.unwrap_or_default();
        if DEFECTS.contains(&&*name) {
            return;
        }
        let is_log = LOGS.contains(&&*name);
        let is_error = ERRORS.contains(&&*name);
        let kind = if is_log {
            Kind::Log
        } else if is_error {
            Kind::Error
        } else {
            Kind::Other
        };
        self.add_all(kind, called.tokens.clone());
    }

    fn visit_expr_method_call(&mut self, call: &'ast ExprMethodCall) {
        let name = call.method.to_string();
        self.visit_expr(&call.receiver);
        // Its text is part of a panic.
        if name != "expect" {
            call.args.iter().for_each(|argument| self.visit_expr(argument));
        }
    }

    fn visit_lit_str(&mut self, literal: &'ast LitStr) {
        self.add(Kind::Other, literal);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<(Kind, String)> {
        of_file(text).unwrap().into_iter().map(|one| (one.kind, one.text)).collect()
    }

    #[test]
    fn errors_logs_and_other_texts_have_kinds() {
        let text = r#"
            /// A doc comment is no message.
            #[derive(Debug, Error)]
            enum PoolError {
                #[error("pool {name} is full")]
                Full { name: String },
            }
            fn run(pool: &str) -> Result<()> {
                tracing::warn!(%pool, reason = "no space left", "pool is full");
                println!("{pool} has been opened");
                ensure!(pool.len() > 3, "a name is too short");
                Err(PoolError::Named(format!("cannot open {pool}")))
            }
        "#;
        let expected = [
            (Kind::Error, "pool {name} is full"),
            (Kind::Log, "no space left"),
            (Kind::Log, "pool is full"),
            (Kind::Other, "{pool} has been opened"),
            (Kind::Error, "a name is too short"),
            (Kind::Other, "cannot open {pool}"),
        ];
        assert_eq!(found(text), expected.map(|(kind, text)| (kind, text.to_owned())));
    }

    #[test]
    fn names_assertions_and_tests_have_no_messages() {
        let text = r#"
            fn run() {
                let key = "max_connections";
                assert!(key.len() > 1, "the key is empty");
                map.get(key).expect("the key is there");
            }
            #[cfg(test)]
            mod tests {
                const TEXT: &str = "two words";
            }
            #[test]
            fn test() { check("two words"); }
        "#;
        assert_eq!(found(text), []);
    }

    #[test]
    fn a_text_over_several_lines_is_one_line() {
        let text = "fn f() { g(\"cannot open pool: \\\n     no such file\"); }";
        let expected = (Kind::Other, "cannot open pool: no such file".to_owned());
        assert_eq!(found(text), [expected]);
    }
}
