//! Draws boxes and arrows as SVG, from a description in text.

use anyhow::{Context, Result, ensure};

/// Pixels of a unit of the description.
const UNIT: i32 = 10;
/// Pixels from one line of a box to the next.
const LINE: i32 = 16;
/// The widest that a character is, on average; a text that could be wider than its box is refused.
const CHARACTER: i32 = 7;

/// Colours that can be read on a light and on a dark page, as the drawing has a ground of its own.
const STYLE: &str = "\
<style>
  text { font-family: sans-serif; font-size: 12px; fill: #1f2933; }
  .title { font-size: 14px; font-weight: bold; }
  .ground { fill: #f5f7fa; }
  .group { fill: #e4ecf5; stroke: #7b8794; stroke-dasharray: 6 4; }
  .box { fill: #ffffff; stroke: #52606d; }
  .arrow { stroke: #52606d; stroke-width: 1.5; marker-end: url(#head); }
  .both { marker-start: url(#head); }
</style>
<defs>
  <marker id=\"head\" viewBox=\"0 0 8 8\" refX=\"8\" refY=\"4\" markerWidth=\"6\" \
markerHeight=\"6\" orient=\"auto-start-reverse\"><path d=\"M0 0 L8 4 L0 8 z\" fill=\"#52606d\"/></marker>
</defs>
";

/// A box or a group, in pixels.
struct Shape<'a> {
    name: &'a str,
    is_group: bool,
    left: i32,
    top: i32,
    width: i32,
    height: i32,
    lines: Vec<&'a str>,
}

/// Draws a description.
///
/// # Errors
/// When a line of it can't be understood, or a text does not fit.
pub(super) fn draw(description: &str) -> Result<String> {
    let (mut shapes, mut arrows) = (Vec::new(), Vec::new());
    for line in description.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (kind, rest) = line.split_once(' ').context("a word alone")?;
        let (head, text) = rest.split_once(": ").with_context(|| format!("no text: {line}"))?;
        match kind {
            "arrow" => arrows.push((head, text)),
            "box" | "group" => shapes.push(shape(kind == "group", head, text)?),
            _ => anyhow::bail!("unknown: {line}"),
        }
    }
    let right = shapes.iter().map(|one| one.left + one.width).max().context("no box")? + UNIT;
    let bottom = shapes.iter().map(|one| one.top + one.height).max().context("no box")? + UNIT;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {right} {bottom}\" \
         width=\"{right}\" height=\"{bottom}\">\n{STYLE}\
         <rect class=\"ground\" width=\"{right}\" height=\"{bottom}\"/>\n"
    );
    for shape in &shapes {
        svg.push_str(&shape.draw());
    }
    for (ends, label) in arrows {
        let drawn = arrow(&shapes, ends, label);
        svg.push_str(&drawn.with_context(|| format!("arrow {ends}"))?);
    }
    svg.push_str("</svg>\n");
    Ok(svg)
}

fn shape<'a>(is_group: bool, head: &'a str, text: &'a str) -> Result<Shape<'a>> {
    let words: Vec<&str> = head.split(' ').collect();
    let &[name, left, top, width, height] = words.as_slice() else {
        anyhow::bail!("{head}: must be a name and four numbers")
    };
    let pixels = |text: &str| -> Result<i32> { Ok(text.parse::<i32>()? * UNIT) };
    let lines: Vec<&str> = text.split(" | ").collect();
    let (left, top, width, height) = (pixels(left)?, pixels(top)?, pixels(width)?, pixels(height)?);
    let longest = lines.iter().map(|line| line.chars().count()).max().unwrap_or(0);
    let fits = i32::try_from(longest)? * CHARACTER <= width;
    ensure!(fits && i32::try_from(lines.len())? * LINE <= height, "{name}: the text is too large");
    Ok(Shape { name, is_group, left, top, width, height, lines })
}

impl Shape<'_> {
    fn draw(&self) -> String {
        let Self { left, top, width, height, .. } = self;
        let class = if self.is_group { "group" } else { "box" };
        let mut svg = format!(
            "<rect class=\"{class}\" x=\"{left}\" y=\"{top}\" width=\"{width}\" \
             height=\"{height}\" rx=\"4\"/>\n"
        );
        let (middle, mut y) = (left + width / 2, top + LINE + 2);
        for (index, line) in self.lines.iter().enumerate() {
            let class = if index == 0 { " class=\"title\"" } else { "" };
            let text = escaped(line);
            svg.push_str(&format!(
                "<text x=\"{middle}\" y=\"{y}\" text-anchor=\"middle\"{class}>{text}</text>\n"
            ));
            y += LINE;
        }
        svg
    }
}

/// A straight line between two boxes that are above or beside each other, in the middle of the part
/// that they have in common.
fn arrow(shapes: &[Shape<'_>], ends: &str, label: &str) -> Result<String> {
    let (both, separator) =
        (ends.contains("<->"), if ends.contains("<->") { " <-> " } else { " -> " });
    let (from, to) = ends.split_once(separator).context("must be FROM -> TO")?;
    let find = |name: &str| {
        let found = shapes.iter().find(|shape| shape.name == name);
        found.with_context(|| format!("no box {name}"))
    };
    let (from, to) = (find(from)?, find(to)?);
    let common = |a: i32, a_size: i32, b: i32, b_size: i32| {
        let (begin, end) = (a.max(b), (a + a_size).min(b + b_size));
        (begin < end).then_some((begin + end) / 2)
    };
    let (x1, y1, x2, y2) = if let Some(x) = common(from.left, from.width, to.left, to.width) {
        let down = from.top < to.top;
        let (begin, end) =
            if down { (from.top + from.height, to.top) } else { (from.top, to.top + to.height) };
        (x, begin, x, end)
    } else {
        let y = common(from.top, from.height, to.top, to.height).context("not aligned")?;
        let right = from.left < to.left;
        let (begin, end) =
            if right { (from.left + from.width, to.left) } else { (from.left, to.left + to.width) };
        (begin, y, end, y)
    };
    let class = if both { "arrow both" } else { "arrow" };
    let (x, y) = ((x1 + x2) / 2, (y1 + y2) / 2);
    let (x, y, anchor) = if x1 == x2 { (x + 6, y + 4, "start") } else { (x, y - 6, "middle") };
    let label = escaped(label);
    Ok(format!(
        "<line class=\"{class}\" x1=\"{x1}\" y1=\"{y1}\" x2=\"{x2}\" y2=\"{y2}\"/>\n\
         <text x=\"{x}\" y=\"{y}\" text-anchor=\"{anchor}\">{label}</text>\n"
    ))
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boxes_and_arrows_are_drawn() {
        let svg =
            draw("# two\nbox a 1 1 10 4: A | b & c\nbox b 1 9 10 4: B\narrow a -> b: x\n").unwrap();
        assert!(svg.contains(">b &amp; c</text>"), "{svg}");
        assert!(svg.contains("x1=\"60\" y1=\"50\" x2=\"60\" y2=\"90\""), "{svg}");
    }

    #[test]
    fn mistakes_in_a_description_are_named() {
        for (text, error) in [
            ("box a 1 1 2 2: longer than that", "a: the text is too large"),
            ("box a 1 1 9 2: A\narrow a -> b: x", "no box b"),
            ("box a 1 1 9 2: A\nbox b 20 9 9 2: B\narrow a -> b: x", "not aligned"),
            ("circle a 1 1 9 2: A", "unknown: circle a 1 1 9 2: A"),
        ] {
            let found = format!("{:#}", draw(text).unwrap_err());
            assert!(found.contains(error), "{found}");
        }
    }
}
