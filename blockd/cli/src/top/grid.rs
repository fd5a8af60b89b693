//! Tables of the screen. Columns that do not fit are left out, the least important one first;
//! numbers get a shorter form, words an ellipsis; no digit is ever cut off.

use ratatui::style::{Color, Modifier, Style};
use ratatui::symbols::bar::NINE_LEVELS;
use ratatui::text::{Line, Span};

use super::sort::Sort;
use super::values::Forms;
use crate::output::terminal::Tone;

/// Words are made no narrower than an eighth of the screen, within these bounds.
const LEAST_WORDS: (usize, usize) = (8, 24);
/// Drawings take no more than this, and no less than that.
const MOST_DRAWING: usize = 40;
const LEAST_DRAWING: usize = 8;
/// From this width on there are two spaces between columns.
const ROOMY: usize = 100;
/// In place of a number of which not even the shortest form fits.
const NO_ROOM: &str = "#";

/// The parts of a bar's last character, in eighths.
const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];

/// The kind of a column's cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// To the left.
    Words,
    /// To the right.
    Number,
    /// A bar, a series or parts of a whole.
    Drawing,
}

/// A column.
#[derive(Clone, Copy, Debug)]
pub(super) struct Column {
    pub(super) title: &'static str,
    pub(super) kind: Kind,
    /// How soon it is left out: the highest rank first, 0 never.
    pub(super) rank: u8,
    /// The order in which it is the key.
    pub(super) sort: Option<Sort>,
}

/// The content of a cell.
#[derive(Clone, Debug)]
pub(super) enum Content {
    Words(String),
    Number(Forms),
    /// A share in thousandths; nothing where there is no whole.
    Bar(Option<u64>),
    /// A series, the newest last.
    Series(Vec<u64>),
    /// Letters with their parts of a whole, and their tones.
    Parts(Vec<(char, Tone, u64)>),
}

/// A cell.
#[derive(Clone, Debug)]
pub(super) struct Cell {
    pub(super) content: Content,
    pub(super) tone: Tone,
}

/// A table, and how far it is scrolled.
#[derive(Clone, Debug)]
pub(super) struct Grid {
    pub(super) columns: Vec<Column>,
    pub(super) rows: Vec<Vec<Cell>>,
}

impl Grid {
    /// The heading and the rows from `first` on, in at most `height` lines of at most `width`
    /// characters.
    pub(super) fn lines(
        &self,
        (width, height): (usize, usize),
        first: usize,
        sort: Option<Sort>,
        colour: bool,
    ) -> Vec<Line<'static>> {
        let gap = if width >= ROOMY { 2 } else { 1 };
        let widths = self.widths(width, gap);
        let rows = self.rows.iter().skip(first).take(height.saturating_sub(1));
        let heading = self.heading(&widths, gap, sort);
        let rows = rows.map(|row| {
            let cells = row.iter().zip(&widths).filter_map(|(cell, width)| Some((cell, (*width)?)));
            let mut spans: Vec<Span<'static>> = Vec::new();
            for (at, (cell, width)) in cells.enumerate() {
                if at > 0 {
                    spans.push(Span::raw(" ".repeat(gap)));
                }
                spans.extend(cell.spans(width, colour));
            }
            Line::from(spans)
        });
        std::iter::once(heading).chain(rows).take(height).collect()
    }

    fn heading(&self, widths: &[Option<usize>], gap: usize, sort: Option<Sort>) -> Line<'static> {
        let mut spans = Vec::new();
        for (column, width) in self.columns.iter().zip(widths) {
            let Some(width) = *width else { continue };
            if !spans.is_empty() {
                spans.push(Span::raw(" ".repeat(gap)));
            }
            let title: String = column.title.chars().take(width).collect();
            let pad = " ".repeat(width - title.chars().count());
            let mut style = Style::default().add_modifier(Modifier::BOLD);
            if column.sort.is_some() && column.sort == sort {
                style = style.add_modifier(Modifier::UNDERLINED);
            }
            let title = Span::styled(title, style);
            match column.kind {
                Kind::Number => spans.extend([Span::raw(pad), title]),
                Kind::Words | Kind::Drawing => spans.extend([title, Span::raw(pad)]),
            }
        }
        Line::from(spans)
    }

    /// The width of each column; none for those that are left out.
    fn widths(&self, limit: usize, gap: usize) -> Vec<Option<usize>> {
        let mut widths: Vec<_> = (0..self.columns.len()).map(|at| Some(self.natural(at))).collect();
        loop {
            let shown = widths.iter().flatten().count();
            let total = widths.iter().flatten().sum::<usize>() + gap * shown.saturating_sub(1);
            if total <= limit {
                self.widen(&mut widths, limit - total);
                return widths;
            }
            if !self.narrow(&mut widths, total - limit, limit) && !self.leave_out(&mut widths) {
                return widths;
            }
        }
    }

    /// The width that a column has where there is room.
    fn natural(&self, at: usize) -> usize {
        let title = self.columns[at].title.chars().count();
        self.rows.iter().map(|row| row[at].natural()).fold(title, usize::max)
    }

    /// The least width in which every cell of a column is right.
    fn least(&self, at: usize, limit: usize) -> usize {
        let title = self.columns[at].title.chars().count();
        match self.columns[at].kind {
            Kind::Words => {
                let least = (limit / 8).clamp(LEAST_WORDS.0, LEAST_WORDS.1);
                self.natural(at).min(least.max(title))
            }
            Kind::Drawing => LEAST_DRAWING.max(title),
            Kind::Number => self.rows.iter().map(|row| row[at].least()).fold(title, usize::max),
        }
    }

    /// Narrows the column that matters least and can be narrowed. Returns whether there is one.
    fn narrow(&self, widths: &mut [Option<usize>], by: usize, limit: usize) -> bool {
        let possible = (0..widths.len()).filter_map(|at| {
            let width = widths[at]?;
            // Without rows, a column is no wider than its title.
            let room = width.saturating_sub(self.least(at, limit));
            (room > 0).then_some((self.columns[at].rank, room, at))
        });
        let Some((_, room, at)) = possible.max() else { return false };
        if let Some(width) = &mut widths[at] {
            *width -= room.min(by);
        }
        true
    }

    /// Leaves out the column that matters least; the others are as wide as they can be again.
    fn leave_out(&self, widths: &mut [Option<usize>]) -> bool {
        let shown =
            (0..widths.len()).filter(|&at| widths[at].is_some() && self.columns[at].rank > 0);
        let Some(least) = shown.max_by_key(|&at| (self.columns[at].rank, at)) else { return false };
        widths[least] = None;
        for (at, width) in widths.iter_mut().enumerate() {
            *width = width.map(|_| self.natural(at));
        }
        true
    }

    /// Drawings share the room that is left.
    fn widen(&self, widths: &mut [Option<usize>], mut room: usize) {
        let drawings: Vec<usize> = (0..widths.len())
            .filter(|&at| self.columns[at].kind == Kind::Drawing && widths[at].is_some())
            .collect();
        for (index, at) in drawings.iter().enumerate() {
            let part = room / (drawings.len() - index);
            if let Some(width) = &mut widths[*at] {
                let more = part.min(MOST_DRAWING.saturating_sub(*width));
                *width += more;
                room -= more;
            }
        }
    }
}

impl Cell {
    fn natural(&self) -> usize {
        match &self.content {
            Content::Words(text) => text.chars().count(),
            Content::Number(forms) => forms.first().map_or(0, |form| form.chars().count()),
            Content::Bar(_) | Content::Series(_) | Content::Parts(_) => LEAST_DRAWING,
        }
    }

    fn least(&self) -> usize {
        match &self.content {
            Content::Number(forms) => forms.last().map_or(0, |form| form.chars().count()),
            _ => self.natural(),
        }
    }

    /// The cell in exactly `width` characters.
    fn spans(&self, width: usize, colour: bool) -> Vec<Span<'static>> {
        let style = style(self.tone, colour);
        match &self.content {
            Content::Words(text) => vec![Span::styled(words(text, width), style)],
            Content::Number(forms) => {
                let fits = forms.iter().find(|form| form.chars().count() <= width);
                let text = fits.cloned().unwrap_or_else(|| NO_ROOM.repeat(width));
                vec![Span::styled(format!("{text:>width$}"), style)]
            }
            Content::Bar(None) => vec![Span::styled(words("-", width), style)],
            Content::Bar(Some(share)) => bar(*share, width, style),
            Content::Series(values) => vec![Span::styled(series(values, width), style)],
            Content::Parts(list) => parts(list, width, colour),
        }
    }
}

/// The style of a tone.
pub(super) fn style(tone: Tone, colour: bool) -> Style {
    let plain = Style::default();
    let coloured = |which| if colour { plain.fg(which) } else { plain };
    match tone {
        Tone::Plain => plain,
        Tone::Strong => plain.add_modifier(Modifier::BOLD),
        Tone::Dim => plain.add_modifier(Modifier::DIM),
        Tone::Good => coloured(Color::Green),
        Tone::Warning => coloured(Color::Yellow),
        // Without colours it is at least bold.
        Tone::Bad if colour => plain.fg(Color::Red),
        Tone::Bad => plain.add_modifier(Modifier::BOLD),
        Tone::Colour(index) => {
            const COLOURS: [Color; 4] = [Color::Cyan, Color::Blue, Color::Magenta, Color::Gray];
            coloured(COLOURS[usize::from(index) % COLOURS.len()])
        }
    }
}

/// Words in exactly `width` characters, with an ellipsis where some are missing.
fn words(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return format!("{text:<width$}");
    }
    let kept = text.chars().take(width.saturating_sub(1));
    kept.chain(std::iter::repeat_n('…', width.min(1))).collect()
}

/// A bar in eighths of characters, and dots for the rest.
fn bar(thousandths: u64, width: usize, style: Style) -> Vec<Span<'static>> {
    let whole = u64::try_from(width).unwrap_or(0) * 8;
    let eighths = thousandths.min(1000) * whole / 1000;
    // A little is not nothing.
    let eighths = if thousandths > 0 { eighths.max(1) } else { 0 };
    let eighths = usize::try_from(eighths).unwrap_or(0);
    let mut full = "█".repeat(eighths / 8);
    full.push_str(EIGHTHS[eighths % 8]);
    let rest = "·".repeat(width - full.chars().count());
    let dim = Style::default().add_modifier(Modifier::DIM);
    vec![Span::styled(full, style), Span::styled(rest, dim)]
}

/// The newest values as bars, to the right, as parts of the largest one.
fn series(values: &[u64], width: usize) -> String {
    let shown = &values[values.len().saturating_sub(width)..];
    let most = shown.iter().copied().max().unwrap_or(0).max(1);
    let level = |value: &u64| {
        let eighths = (u128::from(*value) * 8).div_ceil(u128::from(most));
        let levels = [
            NINE_LEVELS.empty,
            NINE_LEVELS.one_eighth,
            NINE_LEVELS.one_quarter,
            NINE_LEVELS.three_eighths,
            NINE_LEVELS.half,
            NINE_LEVELS.five_eighths,
            NINE_LEVELS.three_quarters,
            NINE_LEVELS.seven_eighths,
            NINE_LEVELS.full,
        ];
        levels[usize::try_from(eighths).unwrap_or(8).min(8)]
    };
    let bars: String = shown.iter().map(level).collect();
    format!("{bars:>width$}")
}

/// Letters, as many of each as its part of the whole, rounded at the ends of the parts.
fn parts(list: &[(char, Tone, u64)], width: usize, colour: bool) -> Vec<Span<'static>> {
    let whole: u128 = list.iter().map(|part| u128::from(part.2)).sum();
    if whole == 0 {
        return vec![Span::raw(words("-", width))];
    }
    let (mut sum, mut begin, mut spans) = (0_u128, 0, Vec::new());
    for &(letter, tone, part) in list {
        sum += u128::from(part);
        let end = (sum * u128::try_from(width).unwrap_or(0) * 2 / whole).div_ceil(2);
        let end = usize::try_from(end).unwrap_or(width).min(width);
        let text = std::iter::repeat_n(letter, end.saturating_sub(begin)).collect::<String>();
        spans.push(Span::styled(text, style(tone, colour)));
        begin = begin.max(end);
    }
    spans
}

#[cfg(test)]
mod tests {
    use super::super::values;
    use super::*;

    fn column(title: &'static str, kind: Kind, rank: u8) -> Column {
        Column { title, kind, rank, sort: None }
    }

    fn cell(content: Content) -> Cell {
        Cell { content, tone: Tone::Plain }
    }

    fn text(grid: &Grid, width: usize) -> Vec<String> {
        let lines = grid.lines((width, 9), 0, None, false);
        lines.iter().map(|line| line.to_string().trim_end().to_owned()).collect()
    }

    #[test]
    fn a_number_gets_shorter_and_never_loses_its_first_digits() {
        let number = |forms| cell(Content::Number(forms));
        let grid = Grid {
            columns: vec![
                column("NAME", Kind::Words, 0),
                column("R B/S", Kind::Number, 0),
                column("W B/S", Kind::Number, 1),
            ],
            rows: vec![vec![
                cell(Content::Words("a-name-of-fifteen".to_owned())),
                number(values::size((1011 << 20) + (200 << 10))),
                number(values::size(9 << 30)),
            ]],
        };
        assert_eq!(text(&grid, 40)[1], "a-name-of-fifteen 1011.1 MiB 9 GiB");
        assert_eq!(text(&grid, 33)[1], "a-name-of-fifte… 1011.1 MiB 9 GiB");
        assert_eq!(text(&grid, 24)[1], "a-name-…  1011 MiB 9 GiB");
        assert_eq!(text(&grid, 20)[1], "a-name-… 1011M 9 GiB");
        // The column that matters least is left out.
        assert_eq!(text(&grid, 16)[1], "a-name-…   1011M");
        for width in 1..60 {
            let line = &text(&grid, width)[1];
            assert!(!line.contains(" 011") && !line.contains(" 11."), "{width}: {line}");
        }
    }

    #[test]
    fn drawings_fill_the_room_and_show_a_little_as_more_than_nothing() {
        let grid = Grid {
            columns: vec![column("USE", Kind::Drawing, 0), column("LATELY", Kind::Drawing, 0)],
            rows: vec![
                vec![cell(Content::Bar(Some(500))), cell(Content::Series(vec![1, 50, 100]))],
                vec![cell(Content::Bar(Some(1))), cell(Content::Series(vec![]))],
                vec![cell(Content::Bar(Some(9999))), cell(Content::Series(vec![0, 0]))],
            ],
        };
        let lines = text(&grid, 18);
        assert_eq!(lines[1], "████····       ▁▄█");
        assert_eq!(lines[2], "▏·······");
        assert_eq!(lines[3], "████████");
    }

    #[test]
    fn parts_fill_their_width_exactly() {
        for width in 1..30 {
            let list = [('p', Tone::Plain, 1), ('m', Tone::Plain, 7), ('c', Tone::Plain, 2)];
            let text: String =
                parts(&list, width, false).iter().map(|span| span.content.to_string()).collect();
            assert_eq!(text.len(), width);
        }
        assert_eq!(parts(&[('p', Tone::Plain, 0)], 3, false)[0].content, "-  ");
    }
}
