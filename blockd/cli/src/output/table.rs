//! Tables of plain text: columns as wide as what is in them, numbers to the right.

use super::terminal::{Paint, Terminal, Tone};

/// Between two columns.
const GAP: &str = "  ";

/// A column is not made narrower than this to fit a terminal.
const MIN_COLUMN: usize = 8;

/// To which side a column's text goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// Words.
    Left,
    /// Numbers and sizes.
    Right,
}

/// A cell of a table.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cell {
    text: String,
    tone: Tone,
}

impl Cell {
    /// Text with a tone.
    #[must_use]
    pub(crate) fn toned(text: impl Into<String>, tone: Tone) -> Self {
        Self { text: text.into(), tone }
    }
}

impl From<String> for Cell {
    fn from(text: String) -> Self {
        Self { text, tone: Tone::Plain }
    }
}

impl From<&str> for Cell {
    fn from(text: &str) -> Self {
        Self { text: text.to_owned(), tone: Tone::Plain }
    }
}

/// A table being filled.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    columns: Vec<(&'static str, Side)>,
    rows: Vec<Vec<Cell>>,
}

impl Table {
    /// An empty table with these columns.
    #[must_use]
    pub(crate) fn new(columns: &[(&'static str, Side)]) -> Self {
        Self { columns: columns.to_vec(), rows: Vec::new() }
    }

    /// Adds a row; it has as many cells as the table has columns.
    pub(crate) fn row(&mut self, cells: impl IntoIterator<Item = Cell>) {
        let cells: Vec<Cell> = cells.into_iter().collect();
        assert_eq!(cells.len(), self.columns.len(), "a row has a cell for each column");
        self.rows.push(cells);
    }

    /// The table with its headings, made to fit the terminal.
    #[must_use]
    pub(crate) fn render(&self, terminal: &Terminal) -> String {
        let widths = self.widths(terminal.width);
        let paint = terminal.paint();
        let heading: Vec<Cell> = self
            .columns
            .iter()
            .map(|(title, _)| Cell::toned(title.to_uppercase(), Tone::Strong))
            .collect();
        let mut text = String::new();
        for row in std::iter::once(&heading).chain(&self.rows) {
            text.push_str(&self.line(row, &widths, paint));
            text.push('\n');
        }
        text
    }

    fn line(&self, row: &[Cell], widths: &[usize], paint: Paint) -> String {
        let mut line = String::new();
        let last = row.len() - 1;
        for (index, cell) in row.iter().enumerate() {
            if index > 0 {
                line.push_str(GAP);
            }
            let text = shortened(&cell.text, widths[index]);
            let pad = " ".repeat(widths[index] - text.chars().count());
            let text = paint.text(cell.tone, &text);
            match self.columns[index].1 {
                Side::Right => line.extend([pad, text]),
                // Nothing follows, so nothing has to be lined up.
                Side::Left if index == last => line.push_str(&text),
                Side::Left => line.extend([text, pad]),
            }
        }
        line.truncate(line.trim_end().len());
        line
    }

    /// As wide as the widest text; where that is too wide for the terminal, the widest column of
    /// words gives way. Numbers are never cut.
    fn widths(&self, limit: Option<usize>) -> Vec<usize> {
        let mut widths: Vec<usize> =
            self.columns.iter().map(|(title, _)| title.chars().count()).collect();
        for row in &self.rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(cell.text.chars().count());
            }
        }
        let Some(limit) = limit else {
            return widths;
        };
        let gaps = GAP.len() * (widths.len() - 1);
        loop {
            let total = widths.iter().sum::<usize>() + gaps;
            let widest = (0..widths.len())
                .filter(|&index| self.columns[index].1 == Side::Left && widths[index] > MIN_COLUMN)
                .max_by_key(|&index| widths[index]);
            match widest {
                Some(index) if total > limit => widths[index] -= 1,
                _ => return widths,
            }
        }
    }
}

/// The text in at most `width` characters, with an ellipsis where something is missing.
fn shortened(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let mut short: String = text.chars().take(width.saturating_sub(1)).collect();
    short.push('…');
    short
}

/// Lines of a name and a value each, the values under one another.
#[must_use]
pub(crate) fn properties(rows: &[(&str, String)], paint: Paint) -> String {
    let width = rows.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for (name, value) in rows {
        let pad = " ".repeat(width - name.chars().count());
        text.push_str(&paint.text(Tone::Dim, name));
        text.push_str(&format!("{pad}{GAP}{value}\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let mut table =
            Table::new(&[("name", Side::Left), ("size", Side::Right), ("at", Side::Left)]);
        table.row(["data".into(), "10 GiB".into(), "nbd+unix:///data?socket=/run/nbd.sock".into()]);
        table.row(["a".into(), "512 B".into(), "-".into()]);
        table
    }

    #[test]
    fn numbers_stand_to_the_right() {
        let text = table().render(&Terminal::none());
        let expected = "NAME    SIZE  AT\n\
                        data  10 GiB  nbd+unix:///data?socket=/run/nbd.sock\n\
                        a      512 B  -\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn words_give_way_on_a_narrow_terminal() {
        let narrow = Terminal { interactive: true, width: Some(40), colour: false };
        let text = table().render(&narrow);
        assert!(text.lines().all(|line| line.chars().count() <= 40), "{text}");
        assert!(text.contains("10 GiB  nbd+unix:///data?socket=/…"), "{text}");
    }

    #[test]
    fn values_stand_under_one_another() {
        let rows = [("name", "data".to_owned()), ("block size", "512 B".to_owned())];
        let text = properties(&rows, Terminal::none().paint());
        assert_eq!(text, "name        data\nblock size  512 B\n");
    }
}
