//! Text of a terminal as SVG: a dark rectangle, a line with the command, and characters at their
//! places whatever font the viewer has.

use std::fmt::Write as _;

use ratatui::buffer::Buffer;
use ratatui::style::{Color, Modifier, Style};

/// Pixels of a character, from its left to the next one's, and from one line to the next.
const ADVANCE: f64 = 8.0;
const LINE: f64 = 18.0;
/// From the top of a line to the line that letters stand on.
const BASE: f64 = 13.5;
const MARGIN: f64 = 14.0;

const STYLE: &str = "\
text{font-family:ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;font-size:13px;\
white-space:pre;fill:#e6edf3}.dim{opacity:.6}.bold{font-weight:bold}\
.under{text-decoration:underline}";

/// A character and its style.
#[derive(Clone, Debug, PartialEq)]
struct Cell {
    symbol: char,
    style: Style,
}

/// Lines of characters, the command first.
#[derive(Clone, Debug)]
pub(super) struct Screen {
    title: String,
    lines: Vec<Vec<Cell>>,
}

impl Screen {
    /// The output of a command, with escape sequences for its colours.
    pub(super) fn of_text(command: &str, text: &str) -> Self {
        let mut screen = Self::begun(command);
        for line in text.lines() {
            let mut style = Style::default();
            let mut cells = Vec::new();
            let mut parts = line.split("\x1b[");
            let mut add = |text: &str, style| {
                cells.extend(text.chars().map(|symbol| Cell { symbol, style }));
            };
            add(parts.next().unwrap_or(""), style);
            for part in parts {
                let (code, text) = part.split_once('m').expect("a colour ends with m");
                style = of_code(code);
                add(text, style);
            }
            screen.lines.push(cells);
        }
        screen
    }

    /// The whole screen that a command fills.
    pub(super) fn of_buffer(command: &str, buffer: &Buffer) -> Self {
        let mut screen = Self::begun(command);
        for line in buffer.content().chunks(usize::from(buffer.area.width)) {
            let cells = line.iter().map(|cell| Cell {
                symbol: cell.symbol().chars().next().unwrap_or(' '),
                style: Style {
                    fg: Some(cell.fg).filter(|colour| *colour != Color::Reset),
                    add_modifier: cell.modifier,
                    ..Style::default()
                },
            });
            screen.lines.push(cells.collect());
        }
        screen
    }

    fn begun(command: &str) -> Self {
        let prompt = Style::default().fg(Color::Green);
        let mut line = vec![Cell { symbol: '$', style: prompt }];
        let typed = format!(" {command}");
        line.extend(typed.chars().map(|symbol| Cell { symbol, style: Style::default() }));
        Self { title: command.to_owned(), lines: vec![line] }
    }

    /// The whole file.
    pub(super) fn svg(&self) -> String {
        let longest = self.lines.iter().map(Vec::len).max().unwrap_or(0);
        let width = pixels(longest) + 2.0 * MARGIN;
        let height = LINE * self.lines.len() as f64 + 2.0 * MARGIN;
        let mut text = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             viewBox=\"0 0 {width} {height}\" role=\"img\">\n<title>{}</title>\n\
             <style>{STYLE}</style>\n\
             <rect width=\"{width}\" height=\"{height}\" rx=\"8\" fill=\"#14181d\"/>\n",
            escaped(&self.title)
        );
        let mut top = MARGIN;
        for line in &self.lines {
            draw(&mut text, line, top);
            top += LINE;
        }
        text += "</svg>\n";
        text
    }
}

fn pixels(characters: usize) -> f64 {
    characters as f64 * ADVANCE
}

/// Draws a line: blocks as rectangles, runs of other characters as text.
fn draw(text: &mut String, line: &[Cell], top: f64) {
    let mut at = 0;
    let kind = |cell: &Cell| (block(cell.symbol).is_some(), cell.style);
    for run in line.chunk_by(|one, other| kind(one) == kind(other)) {
        let left = at;
        at += run.len();
        if block(run[0].symbol).is_some() {
            for (index, cell) in run.iter().enumerate() {
                rectangle(text, cell, pixels(left + index) + MARGIN, top);
            }
            continue;
        }
        // Some viewers draw a single space in place of several.
        let words: String = run.iter().map(|cell| cell.symbol).collect();
        let mut begin = left;
        for part in words.split("  ") {
            let shown = part.trim();
            let spaces = part.len() - part.trim_start().len();
            if !shown.is_empty() {
                label(text, shown, pixels(begin + spaces) + MARGIN, top, run[0].style);
            }
            begin += part.chars().count() + 2;
        }
    }
}

fn label(text: &mut String, shown: &str, left: f64, top: f64, style: Style) {
    let (length, y) = (pixels(shown.chars().count()), top + BASE);
    let (style, shown) = (attributes(style), escaped(shown));
    let _ = writeln!(
        text,
        "<text x=\"{left}\" y=\"{y}\" textLength=\"{length}\"{style}>{shown}</text>"
    );
}

/// The part of its place that a block element covers: eighths from the left, and from the bottom.
fn block(symbol: char) -> Option<(f64, f64)> {
    let code = u32::from(symbol);
    match code {
        0x2581..=0x2588 => Some((8.0, f64::from(code - 0x2580))),
        0x2589..=0x258f => Some((f64::from(0x2590 - code), 8.0)),
        _ => None,
    }
}

fn rectangle(text: &mut String, cell: &Cell, left: f64, top: f64) {
    let Some((wide, high)) = block(cell.symbol) else { return };
    // Bars of neighbouring lines do not touch.
    let full = LINE - 4.0;
    let (width, height) = (ADVANCE * wide / 8.0, full * high / 8.0);
    let y = top + 2.0 + full - height;
    let fill = colour(cell.style.fg).unwrap_or("#e6edf3");
    let _ = writeln!(
        text,
        "<rect x=\"{left}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"{fill}\"/>"
    );
}

fn attributes(style: Style) -> String {
    let mut classes = Vec::new();
    for (modifier, class) in
        [(Modifier::BOLD, "bold"), (Modifier::DIM, "dim"), (Modifier::UNDERLINED, "under")]
    {
        if style.add_modifier.contains(modifier) {
            classes.push(class);
        }
    }
    let mut text = String::new();
    if !classes.is_empty() {
        let _ = write!(text, " class=\"{}\"", classes.join(" "));
    }
    if let Some(fill) = colour(style.fg) {
        let _ = write!(text, " style=\"fill:{fill}\"");
    }
    text
}

/// The style of an escape sequence, as `output::terminal` writes them.
fn of_code(code: &str) -> Style {
    let plain = Style::default();
    match code {
        "0" => plain,
        "1" => plain.add_modifier(Modifier::BOLD),
        "2" => plain.add_modifier(Modifier::DIM),
        "31" | "91" => plain.fg(Color::Red),
        "32" | "92" => plain.fg(Color::Green),
        "33" | "93" => plain.fg(Color::Yellow),
        "94" => plain.fg(Color::Blue),
        "95" => plain.fg(Color::Magenta),
        "96" => plain.fg(Color::Cyan),
        _ => panic!("an escape sequence without a style: {code}"),
    }
}

/// Colours that are distinct on the dark ground.
fn colour(colour: Option<Color>) -> Option<&'static str> {
    match colour? {
        Color::Red => Some("#ff7b72"),
        Color::Green => Some("#56d364"),
        Color::Yellow => Some("#e3b341"),
        Color::Blue => Some("#79c0ff"),
        Color::Magenta => Some("#d2a8ff"),
        Color::Cyan => Some("#39c5cf"),
        _ => None,
    }
}

fn escaped(words: &str) -> String {
    words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[test]
fn characters_stand_in_their_columns_with_their_colours() {
    let screen = Screen::of_text("x <y>", "A \x1b[32mgood\x1b[0m  \x1b[1m▌\x1b[0m z");
    let svg = screen.svg();
    for part in [
        "<title>x &lt;y&gt;</title>",
        "<text x=\"14\" y=\"45.5\" textLength=\"8\">A</text>",
        "<text x=\"30\" y=\"45.5\" textLength=\"32\" style=\"fill:#56d364\">good</text>",
        "<rect x=\"78\" y=\"34\" width=\"4\" height=\"14\" fill=\"#e6edf3\"/>",
        "<text x=\"94\" y=\"45.5\" textLength=\"8\">z</text>",
    ] {
        assert!(svg.contains(part), "{part}: {svg}");
    }
    assert!(!svg.contains('\x1b'));
}
