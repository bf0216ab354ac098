# Reads the words of a command line up to the cursor, one per line, then a line with \001, then the table (table.py).
# Prints a candidate and its description per line, and a line with / if files are candidates too.
BEGIN { FS = "\t" }
!in_table {
    if ($0 == "\001") in_table = 1
    else word[count++] = $0
    next
}
$1 == "c" { command[++commands] = $3; summary[$3] = $5; overrides[$3] = ($4 == "+"); next }
$1 == "p" { if (!($2 in positional)) positional[$2] = $4; next }
{ kind[++options] = $1; owner[options] = $2; option[options] = $3; values[options] = $4; about[options] = $5 }

function offer(name, text) {
    if (index(name, current) == 1 && !(name in offered)) {
        offered[name] = 1
        print name "\t" text
    }
}

# Whether an option belongs to the command.
function belongs(i) { return kind[i] == "o" ? owner[i] == name : overrides[name] }

function values_of(wanted, i) {
    for (i = 1; i <= options; i++)
        if (option[i] == wanted && belongs(i)) return values[i]
    return "-"
}

function offer_values(list, prefix, i, number, parts, files) {
    sub(/^[?]/, "", list)
    files = sub(/^\//, "", list)
    if (list == "@" || list == "-") return
    number = split(list, parts, " ")
    for (i = 1; i <= number; i++) offer(prefix parts[i], "")
    if (files) print "/"
}

END {
    current = word[count - 1]
    while (count > 2 && word[1] ~ /^--plugin(=|$)/) {  # files of plugins, before the command
        number = word[1] == "--plugin" ? 2 : 1
        count -= number
        if (count == 1) {
            print "/"
            exit
        }
        for (i = 1; i < count; i++) word[i] = word[i + number]
    }
    if (count == 2) {
        if (current ~ /^--plugin=/) print "/"
        for (i = 1; i <= commands; i++) {
            split(command[i], parts, " ")
            offer(parts[1], parts[1] == command[i] ? summary[command[i]] : "group of commands")
        }
        offer("--help", "list the commands")
        offer("--version", "list the installed packages")
        offer("--plugin", "also load the plugin in a file, for the command that follows")
        exit
    }
    name = (word[1] in summary) ? word[1] : ""
    first = 2
    if (count > 3 && ((word[1] " " word[2]) in summary)) {
        name = word[1] " " word[2]
        first = 3
    }
    if (count == 3)
        for (i = 1; i <= commands; i++)
            if (split(command[i], parts, " ") == 2 && parts[1] == word[1]) offer(parts[2], summary[command[i]])
    if (name == "") exit

    equals = index(current, "=")
    if (current ~ /^--/ && equals) {
        flag = substr(current, 1, equals - 1)
        offer_values(values_of(flag), flag "=")
        exit
    }
    previous = count - 2 >= first ? word[count - 2] : ""
    if (previous ~ /^-/ && previous !~ /=/) {
        list = values_of(previous)
        if (list != "-") offer_values(list, "")
        if (list != "-" && list !~ /^[?]/) exit
    }
    if (current !~ /^-/) {
        if (name in positional) offer_values(positional[name], "")
        exit
    }
    for (i = 1; i <= options; i++) {
        if (!belongs(i) || (kind[i] == "n" && current !~ /^--no/)) continue
        # Without a dot in the word, only the sections: there are hundreds of keys.
        dot = index(option[i], ".")
        if (kind[i] != "o" && current !~ /[.]/) offer(substr(option[i], 1, dot), "section of the config")
        else offer(option[i], about[i])
    }
}
