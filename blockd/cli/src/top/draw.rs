//! The screen of `top`.

use blockd_media::units;
use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Clear, Paragraph};

use super::grid::{self, Grid};
use super::history::History;
use super::model::Snapshot;
use super::sort::Sort;
use super::views;
use crate::output::terminal::Tone;

/// The rows that the screen shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Page {
    #[default]
    Volumes,
    Stages,
    Pools,
    Devices,
    Clients,
}

impl Page {
    /// All of them, in the order of their keys, which are the digits from 1 on.
    pub(crate) const ALL: [Self; 5] =
        [Self::Volumes, Self::Stages, Self::Pools, Self::Devices, Self::Clients];

    /// In words.
    #[must_use]
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Volumes => "volumes",
            Self::Stages => "stages",
            Self::Pools => "pools",
            Self::Devices => "devices",
            Self::Clients => "clients",
        }
    }

    /// The next one; after the last the first.
    #[must_use]
    pub(crate) fn next(self) -> Self {
        let at = Self::ALL.iter().position(|&page| page == self).unwrap_or(0);
        Self::ALL[(at + 1) % Self::ALL.len()]
    }

    /// How many rows of it can be scrolled through.
    #[must_use]
    pub(crate) fn row_count(self, snapshot: &Snapshot) -> usize {
        match self {
            Self::Volumes | Self::Stages => snapshot.volumes.len(),
            Self::Pools => snapshot.pools.len(),
            Self::Devices => snapshot.devices.len(),
            Self::Clients => snapshot.clients.len(),
        }
    }
}

/// The state that keys change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct View {
    pub page: Page,
    pub sort: Sort,
    pub paused: bool,
    pub help: bool,
    /// Rows above the first one shown.
    pub scroll: usize,
    /// In place of an answer: why there is none.
    pub failure: Option<String>,
    pub colour: bool,
}

/// From this height on there are empty lines between the tables.
const ROOMY: usize = 20;

const HELP: [&str; 20] = [
    "1-5 Tab  volumes, stages, pools, devices, clients",
    "s        next order; directly: n name, i IOPS, b bytes,",
    "         l latency, m space",
    "p        pause, and go on",
    "j k      down, up        h  this help        q  quit",
    "A wider screen shows more columns.",
    "P50, P99  median and 99th percentile of the last second,",
    "          from a request's arrival to its answer",
    "HELD      share of the time that connections and queues",
    "          are held back before, 100 % for each",
    "TURN      others have their turn; LIMIT, SPACE, MEMORY:",
    "          limits, a full pool, IO memory of the worker",
    "MAP ...   mean of all requests; the stages add up to the",
    "          total, OTHER is the rest; ~0 is less than the",
    "          worker's clock shows",
    "LIMIT     the larger share used of the volume's limits",
    "FILLS/S   bytes written for the first time",
    "WAITING   volumes with writes that wait for space",
    "OWN ...   IO of the pool itself: log, metadata, folds",
    "QUEUE     mean requests in flight on the device; NOW: now",
];

/// A table on the screen, and the lines that it gets.
struct Part {
    grid: Grid,
    height: usize,
    /// Whether the keys move it up and down.
    scrolls: bool,
}

/// Draws everything.
pub(crate) fn draw(frame: &mut Frame<'_>, snapshot: &Snapshot, history: &History, view: &View) {
    let screen = frame.area();
    let (width, height) = (usize::from(screen.width), usize::from(screen.height));
    // The heading and the footer.
    let room = height.saturating_sub(2);
    let parts = parts(snapshot, history, view, room);
    let rows = view.page.row_count(snapshot);
    let scrolled = parts.iter().filter(|part| part.scrolls);
    let shown = scrolled.map(|part| part.height.saturating_sub(1)).min().unwrap_or(0);
    let first = view.scroll.min(rows.saturating_sub(shown));
    let mut lines = vec![heading(snapshot, view, width)];
    for (at, part) in parts.iter().enumerate() {
        if at > 0 && room >= ROOMY {
            lines.push(Line::default());
        }
        let first = if part.scrolls { first } else { 0 };
        let size = (width, part.height);
        lines.extend(part.grid.lines(size, first, Some(view.sort), view.colour));
    }
    if rows == 0 {
        lines.push(Line::from(empty(view.page)).style(grid::style(Tone::Dim, view.colour)));
    }
    lines.truncate(height.saturating_sub(1));
    lines.resize(height.saturating_sub(1), Line::default());
    let hidden = (rows > shown).then(|| format!("{}-{} of {rows}", first + 1, first + shown));
    lines.push(footer(view, hidden, width));
    frame.render_widget(Paragraph::new(lines), screen);
    if view.help {
        help(frame);
    }
}

/// In place of rows.
fn empty(page: Page) -> &'static str {
    match page {
        Page::Volumes | Page::Stages => "no volumes",
        Page::Pools => "no pools",
        Page::Devices => "no devices, or the daemon is too old to count their IO",
        Page::Clients => "no clients",
    }
}

/// The tables of the page, each with its share of the room.
fn parts(snapshot: &Snapshot, history: &History, view: &View, room: usize) -> Vec<Part> {
    let between = usize::from(room >= ROOMY);
    let part = |grid: Grid, height: usize| Part { grid, height, scrolls: true };
    let rows = view.page.row_count(snapshot) + 1;
    // Two tables with the same rows: both whole, or half of the room each.
    let halves = |upper: Grid, lower: Grid| {
        let half = rows.min(room.saturating_sub(between) / 2);
        vec![part(upper, half), part(lower, half)]
    };
    match view.page {
        Page::Volumes => {
            // Pools have a quarter at most: volumes need the room.
            let pools = (snapshot.pools.len() + 1).min((room / 4).max(2));
            let mut list =
                vec![Part { grid: views::pools(snapshot, history), height: pools, scrolls: false }];
            let left = room.saturating_sub(pools + between);
            list.push(part(views::volumes(snapshot, history), rows.min(left)));
            // The way of requests is shown below where all of it fits.
            if rows * 2 + between <= left {
                list.push(part(views::way(snapshot), rows));
            }
            list
        }
        // On a low screen the means alone.
        Page::Stages if room < 2 * 4 => vec![part(views::way(snapshot), room)],
        Page::Stages => halves(views::way(snapshot), views::stages(snapshot)),
        Page::Pools => halves(views::pools(snapshot, history), views::marks(snapshot)),
        Page::Devices => vec![part(views::devices(snapshot, history), rows.min(room))],
        Page::Clients => vec![part(views::clients(snapshot, history), rows.min(room))],
    }
}

fn heading(snapshot: &Snapshot, view: &View, width: usize) -> Line<'static> {
    if let Some(failure) = &view.failure {
        return Line::from(failure.clone()).style(grid::style(Tone::Bad, view.colour));
    }
    let bold = Style::default().add_modifier(Modifier::BOLD);
    let seconds = snapshot.time_ns / 1_000_000_000;
    let up = format!("{}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60);
    let memory = units::human(snapshot.resident_bytes);
    let text = if width >= 100 {
        format!("blockd, up {up}, memory {memory}")
    } else {
        format!("blockd {up} {memory}")
    };
    let mut spans = vec![Span::styled(text, bold)];
    for (number, page) in (1..).zip(Page::ALL) {
        let is_shown = page == view.page;
        let text = match is_shown {
            true => format!("[{number} {}]", page.name()),
            false => format!("{number} {}", page.name()),
        };
        // The page that is shown is always named.
        if is_shown || width >= 80 {
            spans.push(Span::raw(" "));
            spans.push(Span::styled(text, if is_shown { bold } else { Style::default() }));
        }
    }
    if view.paused {
        spans.insert(1, Span::styled(" PAUSED", grid::style(Tone::Warning, view.colour)));
    }
    Line::from(spans)
}

/// The keys, as many of them as fit, and which rows are shown where some are not.
fn footer(view: &View, hidden: Option<String>, width: usize) -> Line<'static> {
    let sort = format!("s sort: {}", view.sort.name());
    let keys = ["q quit", "h help", "1-5 page", &sort, "p pause", "j k scroll"];
    let mut text = hidden.unwrap_or_default();
    for key in keys {
        let gap = if text.is_empty() { "" } else { "  " };
        if text.chars().count() + gap.len() + key.chars().count() <= width {
            text.push_str(gap);
            text.push_str(key);
        }
    }
    Line::from(text).style(Style::default().add_modifier(Modifier::DIM))
}

fn help(frame: &mut Frame<'_>) {
    let width = HELP.iter().map(|line| line.len()).max().unwrap_or(0) + 4;
    let height = HELP.len() + 2;
    let screen = frame.area();
    let fit = |wanted: usize, room: u16| u16::try_from(wanted).unwrap_or(room).min(room);
    let (width, height) = (fit(width, screen.width), fit(height, screen.height));
    let area =
        Rect { x: (screen.width - width) / 2, y: (screen.height - height) / 2, width, height };
    let text: Vec<Line<'_>> = HELP.iter().map(|line| Line::from(format!(" {line}"))).collect();
    frame.render_widget(Clear, area);
    frame.render_widget(Paragraph::new(text).block(Block::bordered().title(" help ")), area);
}

#[cfg(test)]
pub(crate) mod tests {
    use std::path::Path;

    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::buffer::Buffer;

    use super::super::example;
    use super::super::model::Answers;
    use super::*;

    /// The example on a screen.
    pub(crate) fn buffer(view: &View, size: (u16, u16)) -> Buffer {
        let (mut snapshot, history) = example::shown();
        snapshot.sort(view.sort);
        drawn(&snapshot, &history, view, size)
    }

    fn drawn(
        snapshot: &Snapshot,
        history: &History,
        view: &View,
        (width, height): (u16, u16),
    ) -> Buffer {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, snapshot, history, view)).unwrap();
        terminal.backend().buffer().clone()
    }

    fn screen(view: &View, size: (u16, u16)) -> String {
        text(&buffer(view, size))
    }

    fn text(buffer: &Buffer) -> String {
        let lines = buffer.content().chunks(usize::from(buffer.area.width));
        let lines = lines.map(|line| line.iter().map(|cell| cell.symbol()).collect::<String>());
        lines.map(|line| line.trim_end().to_owned() + "\n").collect()
    }

    /// Every page at every width. `BLOCKD_WRITE_SCREENS=1` writes the files.
    #[test]
    fn the_screens_are_as_in_the_files() {
        for page in Page::ALL {
            for width in [60, 80, 120, 200] {
                let view = View { page, ..View::default() };
                let text = screen(&view, (width, 24));
                let name = format!("src/top/golden/{}-{width}.txt", page.name());
                let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(&name);
                if std::env::var_os("BLOCKD_WRITE_SCREENS").is_some() {
                    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                    std::fs::write(&path, &text).unwrap();
                }
                assert_eq!(std::fs::read_to_string(&path).unwrap_or_default(), text, "{name}");
            }
        }
    }

    /// A rate of 1011.1 MiB/s was once shown as 11.2, in a column that was too narrow.
    #[test]
    fn no_width_cuts_digits_off() {
        let (snapshot, history) = example::shown();
        for width in 60..=250 {
            for page in [Page::Volumes, Page::Devices] {
                let view = View { page, ..View::default() };
                let text = text(&drawn(&snapshot, &history, &view, (width, 24)));
                let line = text.lines().find(|line| line.contains("db-") || line.contains("/vdb"));
                let line = line.unwrap_or_else(|| panic!("{width}: {text}"));
                let forms = ["1011.1 MiB", "1011 MiB", "1011M", "0.9G"];
                assert!(forms.iter().any(|form| line.contains(form)), "{width}: {line}");
                assert!(!text.contains('#'), "{width}: {text}");
            }
        }
    }

    #[test]
    fn ten_lines_are_enough_for_pools_and_volumes() {
        let text = screen(&View::default(), (60, 10));
        assert!(text.contains("POOL") && text.contains("VOLUME"), "{text}");
        assert!(text.contains("1-5 of ") && text.contains("q quit"), "{text}");
    }

    #[test]
    fn a_node_without_rows_is_drawn_at_any_width() {
        let empty = Snapshot::between(None, &Answers::default());
        for width in 1..=250 {
            for page in Page::ALL {
                let view = View { page, ..View::default() };
                let text = text(&drawn(&empty, &History::default(), &view, (width, 24)));
                assert!(width < 60 || text.contains("\nno "), "{width}: {text}");
            }
        }
    }

    #[test]
    fn a_failure_takes_the_headings_place() {
        let view = View { failure: Some("no daemon answers".to_owned()), ..View::default() };
        assert!(screen(&view, (80, 14)).starts_with("no daemon answers\n"));
    }

    #[test]
    fn help_covers_the_middle_and_any_screen_is_enough() {
        let view = View { help: true, paused: true, scroll: 99, ..View::default() };
        let text = screen(&view, (80, 24));
        assert!(text.contains("│ p        pause") && text.contains("PAUSED"), "{text}");
        for page in Page::ALL {
            for size in [(60, 10), (10, 3), (1, 1)] {
                screen(&View { page, ..view.clone() }, size);
                screen(&View { page, help: false, ..view.clone() }, size);
            }
        }
    }

    #[test]
    fn without_colour_no_cell_has_one() {
        use ratatui::style::Color;
        let coloured = |colour| {
            let view = View { colour, ..View::default() };
            let buffer = buffer(&view, (120, 24));
            buffer.content().iter().filter(|cell| cell.fg != Color::Reset).count()
        };
        assert_eq!(coloured(false), 0);
        assert!(coloured(true) > 100);
    }
}
