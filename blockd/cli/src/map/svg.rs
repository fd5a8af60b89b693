//! The picture as SVG: squares in rows, a legend below.

use blockd_media::units;

use super::{Device, Picture, Spot, Use, spots};
use crate::output::shares;

/// Side of a square, in pixels.
const SQUARE: u64 = 8;

/// Lines of one device at most, so that the file stays small.
const MAX_LINES: u64 = 64;

/// Height of a line of text.
const LINE: u64 = 18;

/// Around everything.
const MARGIN: u64 = 10;

/// Colours of volumes, distinct for colour-blind people as well (Okabe and Ito).
const COLOURS: [&str; 6] = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00"];

/// The whole file. `columns` squares stand in a row.
#[must_use]
pub(crate) fn draw(picture: &Picture, columns: u64) -> String {
    let columns = columns.max(1);
    let mut body = String::new();
    let mut y = MARGIN + LINE;
    text(&mut body, MARGIN, y, &heading(picture));
    for device in &picture.devices {
        y += LINE;
        text(&mut body, MARGIN, y, &device.path);
        y += LINE / 2;
        y += squares(&mut body, device, columns, y);
    }
    let legend = picture.legend();
    let counts: Vec<u64> = legend.iter().map(|entry| entry.count).collect();
    for (entry, share) in legend.into_iter().zip(shares(&counts)) {
        y += LINE;
        rect(&mut body, (MARGIN, y - SQUARE), SQUARE, fill(entry.what), true);
        let size = units::human(entry.count * picture.extent_bytes);
        text(&mut body, MARGIN + 2 * SQUARE, y, &format!("{}: {size}, {share}", entry.name));
    }
    let width = (columns * SQUARE).max(320) + 2 * MARGIN;
    let height = y + MARGIN;
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n{body}</svg>\n"
    )
}

fn heading(picture: &Picture) -> String {
    let size = units::human(picture.total_count() * picture.extent_bytes);
    format!("pool {}: {size}", picture.pool)
}

/// Draws the squares of one device and returns their height.
fn squares(body: &mut String, device: &Device, columns: u64, top: u64) -> u64 {
    let (spots, _) = spots(device, columns * MAX_LINES);
    let columns = usize::try_from(columns).unwrap_or(usize::MAX);
    let mut y = top;
    for line in spots.chunks(columns) {
        let mut x = MARGIN;
        for run in line.chunk_by(|one: &Spot, other| one == other) {
            let width = u64::try_from(run.len()).unwrap_or(0) * SQUARE;
            rect(body, (x, y), width, fill(run[0].what), run[0].full);
            x += width;
        }
        y += SQUARE;
    }
    y - top
}

/// Half of the colour where some of the extents are free.
fn rect(body: &mut String, (x, y): (u64, u64), width: u64, fill: &str, full: bool) {
    let opacity = if full || fill == FREE { "" } else { " fill-opacity=\"0.5\"" };
    body.push_str(&format!(
        "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{SQUARE}\" fill=\"{fill}\"{opacity}/>\n"
    ));
}

const FREE: &str = "#e8e8e8";

fn fill(what: Use) -> &'static str {
    match what {
        Use::Metadata => "#444444",
        Use::Volume(index) => COLOURS[index % COLOURS.len()],
        Use::Shared => "#000000",
        Use::Reserved => "#b0b0b0",
        Use::Free => FREE,
    }
}

fn text(body: &mut String, x: u64, y: u64, words: &str) {
    body.push_str(&format!("<text x=\"{x}\" y=\"{y}\">{}</text>\n", escaped(words)));
}

fn escaped(words: &str) -> String {
    words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::super::tests::picture;
    use super::super::{Run, Use};
    use super::*;

    #[test]
    fn neighbours_are_one_rectangle() {
        let drawn = draw(&picture(), 32);
        let expected = "\
<text x=\"10\" y=\"46\">/srv/default.pool</text>
<rect x=\"10\" y=\"55\" width=\"64\" height=\"8\" fill=\"#444444\"/>
<rect x=\"74\" y=\"55\" width=\"192\" height=\"8\" fill=\"#0072b2\"/>
<rect x=\"10\" y=\"63\" width=\"128\" height=\"8\" fill=\"#0072b2\"/>
<rect x=\"138\" y=\"63\" width=\"128\" height=\"8\" fill=\"#e69f00\"/>
";
        assert!(drawn.contains(expected), "{drawn}");
        assert!(
            drawn.ends_with(
                "<rect x=\"10\" y=\"219\" width=\"8\" height=\"8\" fill=\"#e8e8e8\"/>\n\
             <text x=\"26\" y=\"227\">free: 43 MiB, 67.2 %</text>\n</svg>\n"
            ),
            "{drawn}"
        );
    }

    #[test]
    fn the_file_stays_small_and_is_well_formed() {
        let mut worst = picture();
        worst.pool = "<&>".to_owned();
        worst.devices[0].runs = (0..1_000_000)
            .map(|first| Run { first, count: 1, what: Use::Volume(usize::from(first % 2 == 0)) })
            .collect();
        let drawn = draw(&worst, 64);
        assert!(drawn.len() < 512 << 10, "{}", drawn.len());
        assert!(drawn.contains("pool &lt;&amp;&gt;:"));
    }
}
