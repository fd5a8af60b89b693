//! The screen of `top`.

use blockd_media::units;
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Block, Cell, Clear, Paragraph, Row, Table};

use super::model::{PoolRow, STAGES, Snapshot, Sort, VolumeRow};
use crate::holds::{REASONS, WHOLE};
use crate::output::{human_ns, percent};

/// The state that keys change.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct View {
    pub sort: Sort,
    pub paused: bool,
    pub help: bool,
    /// Volumes above the first one shown.
    pub scroll: usize,
    /// In place of an answer: why there is none.
    pub failure: Option<String>,
    pub colour: bool,
}

/// Pools shown at most; the volumes need the room.
const MAX_POOLS: usize = 6;
/// Volumes that are held back shown at most, those first that are for longest.
const MAX_HELD: usize = 4;

const HELP: [&str; 11] = [
    "q  quit",
    "s  sort by name, operations, bytes, latency, mapped",
    "p  pause, and go on",
    "j  down     k  up",
    "h  this help",
    "",
    "latency: median / 99 %, of the last second's requests",
    "written/s: bytes written for the first time, lately",
    "waiting: volumes with writes that wait for space",
    "slowed: volumes slowed down, as the pool is nearly full",
    "held back: share of the time, 100 % for each connection",
];

/// Draws everything.
pub(crate) fn draw(frame: &mut Frame<'_>, snapshot: &Snapshot, view: &View) {
    let pools = u16::try_from(snapshot.pools.len().clamp(1, MAX_POOLS)).unwrap_or(1);
    let held = held_volumes(snapshot);
    // Nothing is drawn of it while no volume is held back.
    let held_rows = u16::try_from(held.len()).unwrap_or(0);
    let held_rows = if held.is_empty() { 0 } else { held_rows + 2 };
    let rows = [
        Constraint::Length(1),
        Constraint::Length(pools + 2),
        Constraint::Length(pools + 2),
        Constraint::Fill(1),
        Constraint::Fill(1),
        Constraint::Length(held_rows),
        Constraint::Length(1),
    ];
    let [top, pool_area, space_area, volume_area, latency_area, held_area, bottom] =
        Layout::vertical(rows).areas(frame.area());
    frame.render_widget(heading(snapshot, view), top);
    frame.render_widget(pool_table(&snapshot.pools, view), pool_area);
    frame.render_widget(space_table(&snapshot.pools, view), space_area);
    let room = usize::from(volume_area.height.saturating_sub(2));
    let first = view.scroll.min(snapshot.volumes.len().saturating_sub(room));
    let shown = &snapshot.volumes[first..];
    frame.render_widget(volume_table(shown), volume_area);
    frame.render_widget(latency_table(shown), latency_area);
    frame.render_widget(held_table(&held), held_area);
    frame.render_widget(Line::from(footer(view)).style(dim()), bottom);
    if view.help {
        help(frame);
    }
}

fn heading(snapshot: &Snapshot, view: &View) -> Line<'static> {
    if let Some(failure) = &view.failure {
        return Line::from(failure.clone()).style(toned(view, Color::Red));
    }
    let seconds = snapshot.time_ns / 1_000_000_000;
    let up = format!("{}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60);
    let paused = if view.paused { "  PAUSED" } else { "" };
    let memory = units::human(snapshot.resident_bytes);
    Line::from(format!("blockd, up {up}, memory {memory}{paused}")).style(bold())
}

fn footer(view: &View) -> String {
    format!("q quit  s sort: {}  p pause  j k scroll  h help", view.sort.name())
}

fn pool_table(pools: &[PoolRow], view: &View) -> Table<'static> {
    let rows = pools.iter().map(|pool| {
        let state = match pool.state {
            "open" | "closed" => Style::default(),
            _ => toned(view, Color::Red),
        };
        Row::new([
            Cell::from(pool.name.clone()),
            Cell::from(pool.state).style(state),
            right(units::human(pool.size_bytes)),
            right(units::human(pool.used_bytes)),
            right(percent(pool.used_bytes, pool.size_bytes)),
            right(units::human(pool.free_bytes)),
            right(units::human(pool.promised_bytes)),
            right(pool.snapshot_count.to_string()),
            right(match pool.releasing_bytes {
                0 => "-".to_owned(),
                bytes => units::human(bytes),
            }),
        ])
    });
    let heading = Row::new([
        Cell::from("POOL"),
        Cell::from("STATE"),
        right("SIZE"),
        right("USED"),
        right("SHARE"),
        right("FREE"),
        right("PROMISED"),
        right("SNAPS"),
        right("LET GO"),
    ]);
    // With 80 columns a name has 14.
    let lengths = [6, 8, 8, 7, 8, 8, 5, 8];
    let widths = std::iter::once(Constraint::Fill(1)).chain(lengths.map(Constraint::Length));
    Table::new(rows, widths).header(heading.style(bold()))
}

/// How full pools are, how fast they fill, and whom that stops.
fn space_table(pools: &[PoolRow], view: &View) -> Table<'static> {
    let rows = pools.iter().map(|pool| {
        let state = match pool.space_state {
            None | Some("normal") => Style::default(),
            Some("low") => toned(view, Color::Yellow),
            Some(_) => toned(view, Color::Red),
        };
        let waiting = if pool.waiting_volumes > 0 { state } else { Style::default() };
        Row::new([
            Cell::from(pool.name.clone()),
            Cell::from(pool.space_state.unwrap_or("-")).style(state),
            right(units::human(pool.write_rate_bytes)),
            right(pool.full_in()),
            right(units::human(pool.low_bytes)),
            right(units::human(pool.very_low_bytes)),
            right(pool.waiting_volumes.to_string()).style(waiting),
            right(pool.slowed_volumes.to_string()),
        ])
    });
    let heading = Row::new([
        Cell::from("SPACE"),
        Cell::from("STATE"),
        right("WRITTEN/S"),
        right("FULL IN"),
        right("LOW BELOW"),
        right("VERY LOW"),
        right("WAITING"),
        right("SLOWED"),
    ]);
    // With 80 columns a name has 13.
    let lengths = [8, 9, 7, 9, 8, 7, 6];
    let widths = std::iter::once(Constraint::Fill(1)).chain(lengths.map(Constraint::Length));
    Table::new(rows, widths).header(heading.style(bold()))
}

fn volume_table(volumes: &[VolumeRow]) -> Table<'static> {
    let rows = volumes.iter().map(|volume| {
        Row::new([
            Cell::from(label(volume)),
            right(units::human(volume.size_bytes)),
            right(units::human(volume.mapped_bytes)),
            right(volume.reads_per_second.to_string()),
            right(volume.writes_per_second.to_string()),
            right(mebibytes(volume.read_bytes_per_second)),
            right(mebibytes(volume.write_bytes_per_second)),
            right(volume.connections.to_string()),
            right(volume.parked.to_string()),
        ])
    });
    let heading = Row::new([
        Cell::from("VOLUME"),
        right("SIZE"),
        right("MAPPED"),
        right("READ/S"),
        right("WRITE/S"),
        right("R MiB/S"),
        right("W MiB/S"),
        right("CONN"),
        right("PARKED"),
    ]);
    let lengths = [10, 10, 8, 8, 8, 8, 4, 6];
    let widths = std::iter::once(Constraint::Fill(1)).chain(lengths.map(Constraint::Length));
    Table::new(rows, widths).header(heading.style(bold()))
}

fn latency_table(volumes: &[VolumeRow]) -> Table<'static> {
    let rows = volumes.iter().map(|volume| {
        let stages = volume.latency.iter().map(|latency| match latency.p99_ns {
            0 => right("-"),
            p99 => right(format!("{}/{}", human_ns(latency.p50_ns), human_ns(p99))),
        });
        Row::new(std::iter::once(Cell::from(label(volume))).chain(stages))
    });
    let stages = STAGES.iter().map(|(_, name)| right(name.to_uppercase()));
    let heading = Row::new(std::iter::once(Cell::from("LATENCY")).chain(stages));
    let widths = std::iter::once(Constraint::Fill(1)).chain([Constraint::Length(14); 5]);
    Table::new(rows, widths).header(heading.style(bold()))
}

/// Volumes that are held back, or were in the interval.
fn held_volumes(snapshot: &Snapshot) -> Vec<&VolumeRow> {
    let mut held: Vec<_> =
        snapshot.volumes.iter().filter(|volume| volume.held_back() != (0, 0)).collect();
    held.sort_by_key(|volume| std::cmp::Reverse(volume.held_back()));
    held.truncate(MAX_HELD);
    held
}

fn held_table(volumes: &[&VolumeRow]) -> Table<'static> {
    let rows = volumes.iter().map(|volume| {
        let reasons = volume.held.iter().map(|held| match held.ns_per_second {
            0 => right("-"),
            ns => right(percent(ns, WHOLE)),
        });
        let now = right(volume.held_back().1.to_string());
        Row::new(std::iter::once(Cell::from(label(volume))).chain(reasons).chain([now]))
    });
    let reasons = REASONS.iter().map(|(_, name)| right(name.to_uppercase()));
    let heading = std::iter::once(Cell::from("HELD BACK")).chain(reasons).chain([right("NOW")]);
    let lengths = [10, 10, 10, 10, 5];
    let widths = std::iter::once(Constraint::Fill(1)).chain(lengths.map(Constraint::Length));
    Table::new(rows, widths).header(Row::new(heading).style(bold()))
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

/// Pools other than the usual one are named with the volume.
fn label(volume: &VolumeRow) -> String {
    if volume.pool == "default" {
        volume.label()
    } else {
        format!("{}/{}", volume.pool, volume.label())
    }
}

/// With one digit after the point.
fn mebibytes(bytes: u64) -> String {
    let tenths = (u128::from(bytes) * 10) >> 20;
    format!("{}.{}", tenths / 10, tenths % 10)
}

fn right(text: impl Into<String>) -> Cell<'static> {
    Cell::from(Line::from(text.into()).right_aligned())
}

fn bold() -> Style {
    Style::default().add_modifier(Modifier::BOLD)
}

fn dim() -> Style {
    Style::default().add_modifier(Modifier::DIM)
}

fn toned(view: &View, colour: Color) -> Style {
    if view.colour { Style::default().fg(colour) } else { bold() }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::model::tests::answers;
    use super::*;

    fn screen(view: &View, (width, height): (u16, u16)) -> String {
        let snapshot = Snapshot::between(Some(&answers(2)), &answers(4));
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, &snapshot, view)).unwrap();
        let buffer = terminal.backend().buffer();
        let lines = buffer.content().chunks(usize::from(width));
        let lines = lines.map(|line| line.iter().map(|cell| cell.symbol()).collect::<String>());
        lines.map(|line| line.trim_end().to_owned() + "\n").collect()
    }

    #[test]
    fn the_screen_is_as_drawn_here() {
        let expected = include_str!("screen.txt");
        assert_eq!(screen(&View::default(), (100, 20)), expected);
    }

    #[test]
    fn a_failure_takes_the_headings_place() {
        let view = View { failure: Some("no daemon answers".to_owned()), ..View::default() };
        assert!(screen(&view, (80, 14)).starts_with("no daemon answers\n"));
    }

    #[test]
    fn help_covers_the_middle_and_any_screen_is_enough() {
        let view = View { help: true, paused: true, scroll: 99, ..View::default() };
        let text = screen(&view, (80, 20));
        assert!(text.contains("│ q  quit") && text.contains("PAUSED"), "{text}");
        screen(&view, (10, 3));
        screen(&view, (1, 1));
    }
}
