//! The picture in characters.

use blockd_media::units::counted;

use super::{Picture, Spot, Use, letter, spots, tone};
use crate::output::table::{Cell, Side, Table};
use crate::output::terminal::Terminal;
use crate::output::{Output, shares};

/// Lines of one device at most.
const MAX_LINES: u64 = 16;

/// Characters in a line where the width is unknown.
const DEFAULT_WIDTH: usize = 64;

/// Beyond this, lines are hard to follow with the eye.
const MAX_WIDTH: usize = 128;

/// The whole picture with its legend.
#[must_use]
pub(crate) fn draw(picture: &Picture, width: Option<usize>, output: &Output) -> String {
    let terminal = output.terminal();
    let width = width
        .unwrap_or_else(|| terminal.width.map_or(DEFAULT_WIDTH, |columns| columns.min(MAX_WIDTH)))
        .max(1);
    let mut text = format!(
        "pool {}: {} in {} extents of {}\n",
        picture.pool,
        output.size(picture.total_count() * picture.extent_bytes),
        picture.total_count(),
        output.size(picture.extent_bytes),
    );
    for device in &picture.devices {
        let columns = u64::try_from(width).unwrap_or(1);
        let (spots, each) = spots(device, columns * MAX_LINES);
        text.push_str(&format!(
            "\n{}: a character is {} ({})\n",
            device.path,
            counted(each, "extent"),
            output.size(each * picture.extent_bytes),
        ));
        for line in spots.chunks(width) {
            text.push_str(&coloured(line, terminal));
            text.push('\n');
        }
    }
    text.push('\n');
    text.push_str(&legend(picture, output));
    text
}

/// A line, with one change of colour for each run of equal spots.
fn coloured(line: &[Spot], terminal: &Terminal) -> String {
    let paint = terminal.paint();
    line.chunk_by(|one, other| one.what == other.what)
        .map(|run| {
            paint.text(tone(run[0].what), &run.iter().copied().map(letter).collect::<String>())
        })
        .collect()
}

fn legend(picture: &Picture, output: &Output) -> String {
    let mut table = Table::new(&[
        ("", Side::Left),
        ("use", Side::Left),
        ("size", Side::Right),
        ("extents", Side::Right),
        ("share", Side::Right),
    ]);
    let legend = picture.legend();
    let counts: Vec<u64> = legend.iter().map(|entry| entry.count).collect();
    for (entry, share) in legend.into_iter().zip(shares(&counts)) {
        let sign = letter(Spot { what: entry.what, full: true }).to_string();
        let name = match entry.what {
            Use::Volume(_) => format!("volume {}", entry.name),
            _ => entry.name,
        };
        table.row([
            Cell::toned(sign, tone(entry.what)),
            name.into(),
            output.size(entry.count * picture.extent_bytes).into(),
            entry.count.to_string().into(),
            share.into(),
        ]);
    }
    table.render(output.terminal())
}

#[cfg(test)]
mod tests {
    use super::super::tests::picture;
    use super::*;

    #[test]
    fn the_picture_is_as_drawn_here() {
        let output = Output::with(false, false, Terminal::none());
        let expected = "\
pool default: 64 MiB in 256 extents of 256 KiB

/srv/default.pool: a character is 1 extent (256 KiB)
########AAAAAAAAAAAAAAAAAAAAAAAA
AAAAAAAAAAAAAAAABBBBBBBBBBBBBBBB
BBBB====------------............
................................
................................
................................
................................
................................

   USE            SIZE  EXTENTS   SHARE
#  metadata      2 MiB        8   3.1 %
A  volume data  10 MiB       40  15.6 %
B  volume logs   5 MiB       20   7.8 %
=  shared        1 MiB        4   1.6 %
-  reserved      3 MiB       12   4.7 %
.  free         43 MiB      172  67.2 %
";
        assert_eq!(draw(&picture(), Some(32), &output), expected);
    }

    #[test]
    fn a_big_pool_takes_few_lines() {
        let mut big = picture();
        big.devices[0].runs.last_mut().unwrap().count = 10_000_000;
        let output = Output::with(false, false, Terminal::none());
        let text = draw(&big, None, &output);
        assert!(text.lines().count() <= 30, "{text}");
        // The small letter: of these extents most are free, and still they show.
        assert!(text.contains("\na......"), "{text}");
    }
}
