"""Things that have one right answer, in the order (question word, answer)."""

CAPITALS = dict(
    pair.split(":")
    for pair in (
        "France:Paris Norway:Oslo Peru:Lima Egypt:Cairo Japan:Tokyo Italy:Rome India:Delhi Ecuador:Quito Austria:Vienna "
        "Ireland:Dublin Greece:Athens Spain:Madrid Germany:Berlin Portugal:Lisbon Poland:Warsaw Finland:Helsinki "
        "Colombia:Bogota Kenya:Nairobi Vietnam:Hanoi Cuba:Havana Croatia:Zagreb Latvia:Riga Sweden:Stockholm "
        "Denmark:Copenhagen Hungary:Budapest Chile:Santiago Canada:Ottawa Turkey:Ankara Iran:Tehran China:Beijing"
    ).split()
)
OPPOSITES = dict(
    pair.split(":")
    for pair in (
        "hot:cold big:small fast:slow day:night up:down old:new light:dark early:late open:closed full:empty hard:soft "
        "high:low left:right long:short loud:quiet near:far rich:poor strong:weak sweet:bitter thick:thin true:false "
        "wet:dry wide:narrow young:old happy:sad clean:dirty cheap:expensive deep:shallow good:bad"
    ).split()
)
YOUNG = dict(
    pair.split(":")
    for pair in (
        "dog:puppy cat:kitten cow:calf sheep:lamb horse:foal pig:piglet duck:duckling goat:kid bear:cub deer:fawn "
        "goose:gosling hen:chick lion:cub kangaroo:joey swan:cygnet"
    ).split()
)
COLOURS = dict(
    pair.split(":")
    for pair in (
        "grass:green snow:white coal:black blood:red milk:white lemons:yellow emeralds:green rubies:red "
        "chocolate:brown clouds:white tomatoes:red bananas:yellow"
    ).split()
)
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
NUMERALS = "zero one two three four five six seven eight nine ten eleven twelve".split()
